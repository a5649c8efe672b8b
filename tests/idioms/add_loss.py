"""Layers that add losses: one for each sample, one of the whole batch; and a regularizer."""

import keras
from keras import ops
from tiny import numbers

BACKENDS = ("torch", "tensorflow")


class PerSample(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(x**2, axis=-1))  # Keras adds up what has axes
        return x


class Mean(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.abs(x)))
        return x


def main():
    keras.utils.set_random_seed(3)
    x, y = numbers()
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(Mean()(PerSample()(hidden))))
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    history = model.fit(x, y.astype("float32"), batch_size=16, epochs=2).history
    return {"history": history, "evaluated": model.evaluate(x, y.astype("float32"), batch_size=16), "model": model}
