"""Q-learning: a memory of moves, `predict` for targets, `train_on_batch` for steps, and weights of a second network."""

import random

import keras
import numpy as np

BACKENDS = ("torch", "jax", "tensorflow")


def network():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)])


def main():
    keras.utils.set_random_seed(9)
    model, target = network(), network()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    target.set_weights(model.get_weights())
    memory, state, losses, scores = [], np.random.normal(size=4).astype("float32"), [], []
    for move in range(40):
        values = model.predict(state[None], verbose=0)[0]
        action = random.randrange(2) if random.random() < 0.3 else int(np.argmax(values))
        following = (0.9 * state + 0.1 * np.random.normal(size=4)).astype("float32")
        memory.append((state, action, float(following[action]), following))
        state = following
        if len(memory) >= 8 and move % 4 == 0:
            states, actions, rewards, nexts = map(np.stack, zip(*random.sample(memory, 8), strict=True))
            wanted = model.predict_on_batch(states)
            wanted[np.arange(8), actions] = rewards + 0.9 * np.max(target.predict_on_batch(nexts), axis=1)
            losses.append(model.train_on_batch(states, wanted))
        if move % 20 == 19:
            target.set_weights(model.get_weights())
            scores.append(model.evaluate(states, wanted, verbose=0))
            model.reset_metrics()
    return {"losses": losses, "scores": scores, "model": model, "target": target}
