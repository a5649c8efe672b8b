"""Reinforcement: episodes as long as chance has it, actions drawn from what the model says, a step after each."""

import keras
import numpy as np
import tensorflow as tf

BACKENDS = ("tensorflow",)


def main():
    keras.utils.set_random_seed(9)
    inputs = keras.Input((4,))
    common = keras.layers.Dense(8, activation="relu")(inputs)
    actor, critic = keras.layers.Dense(2, activation="softmax")(common), keras.layers.Dense(1)(common)
    model, optimizer = keras.Model(inputs, [actor, critic]), keras.optimizers.Adam(0.01)
    huber, lengths = keras.losses.Huber(), []
    for _ in range(5):
        state, rewards, chosen, values = np.random.normal(size=4), [], [], []
        with tf.GradientTape() as tape:
            for step in range(20):
                odds, value = model(tf.constant(state[None], tf.float32))
                action = np.random.choice(2, p=np.squeeze(odds))
                chosen.append(tf.math.log(odds[0, action]))
                values.append(value[0, 0])
                state = 0.9 * state + 0.1 * np.random.normal(size=4)
                rewards.append(float(state[action]))
                if np.random.uniform() < 0.15 or step == 19:
                    break
            returns = np.cumsum(rewards[::-1])[::-1]
            loss = 0.0
            for log_odds, value, result in zip(chosen, values, returns, strict=True):
                loss += -log_odds * (result - value) + huber(
                    tf.expand_dims(value, 0), tf.constant([result], tf.float32)
                )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        lengths.append(len(rewards))
    return {"lengths": lengths, "model": model}
