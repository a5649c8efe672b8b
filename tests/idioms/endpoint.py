"""A last layer that adds the loss and keeps a metric; a regularizer; a model of which no loss is compiled."""

import keras
from keras import ops
from tiny import numbers

BACKENDS = ("torch", "tensorflow")  # on JAX Keras fails with one rank, too


class Endpoint(keras.layers.Layer):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.right = keras.metrics.SparseCategoricalAccuracy(name="right")
        self.size = keras.metrics.Mean(name="size")

    def call(self, targets, logits, weights=None):
        self.add_loss(self.loss_of(targets, logits, weights))
        self.right.update_state(targets, logits, weights)
        self.size.update_state(ops.mean(ops.abs(logits)))
        return ops.softmax(logits)


def main():
    keras.utils.set_random_seed(2)
    x, y = numbers(57)
    inputs, targets = keras.Input((6,), name="inputs"), keras.Input((), dtype="int32", name="targets")
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
    outputs = Endpoint(name="end")(targets, keras.layers.Dense(3)(hidden))
    model = keras.Model([inputs, targets], outputs)
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    data = {"inputs": x, "targets": y}
    history = model.fit(data, batch_size=8, epochs=2, validation_data=({"inputs": x[:13], "targets": y[:13]}, None))
    return {"history": history.history, "model": model, "scores": model.evaluate(data, batch_size=9, return_dict=True)}
