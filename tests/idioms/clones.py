"""An ensemble of clones, then transfer: the best one frozen under a new head, thawed, and exported in part."""

import keras
import numpy as np
from tiny import numbers

BACKENDS = ("torch", "jax", "tensorflow")
layers = keras.layers


def main():
    keras.utils.set_random_seed(7)
    x, y = numbers(61)
    base = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu", name="hidden"), layers.Dense(3)])
    loss, members, scores = keras.losses.SparseCategoricalCrossentropy(from_logits=True), [], []
    for rate in (0.01, 0.1):
        member = keras.models.clone_model(base)
        member.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
        member.fit(x, y, batch_size=8, epochs=2, verbose=0)
        members.append(member)
        scores.append(member.evaluate(x, y, verbose=0)[0])
    together = np.mean([member.predict(x, batch_size=7, verbose=0) for member in members], axis=0)
    best = members[int(np.argmin(scores))]
    body = keras.Model(best.inputs, best.get_layer("hidden").output)
    body.trainable = False
    model = keras.Sequential([body, layers.Dense(1, name="head")])
    target = x[:, :1] - x[:, 1:2]
    history = []
    for thawed, rate in ((False, 0.05), (True, 0.01)):
        body.trainable = thawed
        model.compile(keras.optimizers.Adam(rate), "mse")
        history.append(model.fit(x, target, batch_size=8, epochs=2, verbose=0, validation_split=0.2).history)
        model.save_weights("model.weights.h5")
    other = keras.models.clone_model(model)
    other.load_weights("model.weights.h5")
    features = keras.Model(other.layers[0].inputs, other.layers[0].output).predict(x, verbose=0)
    return {"scores": scores, "together": together, "history": history, "model": model, "features": features}
