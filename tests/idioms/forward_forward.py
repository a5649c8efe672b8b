"""Layers that train themselves, each with an optimizer of its own, inside of the step of a model (forward-forward)."""

import keras
from keras import ops
from tiny import numbers

BACKENDS = ("tensorflow",)


class Local(keras.layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(units, activation="relu")
        self.optimizer = keras.optimizers.SGD(0.05)
        self.tracker = keras.metrics.Mean()

    def call(self, x):
        return self.dense(x / (ops.norm(x, axis=1, keepdims=True) + 1e-4))

    def improve(self, positive, negative):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            good, bad = (ops.mean(self(x) ** 2, axis=1) for x in (positive, negative))
            loss = ops.mean(ops.softplus(ops.concatenate([1 - good, bad - 1])))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.tracker.update_state(loss)
        return self(positive), self(negative)


class Stack(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [Local(8), Local(6)]
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x

    def train_step(self, data):
        x, _ = data
        positive, negative = x, ops.flip(x, axis=1)
        loss = 0.0
        for part in self.parts:
            positive, negative = part.improve(positive, negative)
            loss += part.tracker.result()
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "last": ops.mean(positive)}

    @property
    def metrics(self):
        return [self.tracker, *(part.tracker for part in self.parts)]


def main():
    keras.utils.set_random_seed(1)
    x, y = numbers(57)
    model = Stack()
    model.compile()
    return {"history": model.fit(x, y, batch_size=8, epochs=2, shuffle=False).history, "model": model}
