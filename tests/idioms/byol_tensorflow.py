"""BYOL: an online network learns what a target network says, whose weights follow it slowly."""

import keras
import tensorflow as tf
from keras import ops
from tiny import numbers

BACKENDS = ("tensorflow",)


def encoder(name):
    layers = keras.layers
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(4)], name=name)


class Byol(keras.Model):
    def __init__(self):
        super().__init__()
        self.online, self.target = encoder("online"), encoder("target")
        self.predictor = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        self.target.set_weights(self.online.get_weights())
        self.tracker = keras.metrics.Mean("loss")
        self.momentum = 0.9
        self.call_count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        return self.online(x)

    def train_step(self, data):
        left, right = data
        with tf.GradientTape() as tape:
            ours = ops.normalize(self.predictor(self.online(left, training=True)))
            theirs = tf.stop_gradient(ops.normalize(self.target(right, training=False)))
            loss = tf.reduce_mean(2 - 2 * tf.reduce_sum(ours * theirs, axis=1))
        weights = self.online.trainable_weights + self.predictor.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for slow, fast in zip(self.target.weights, self.online.weights, strict=True):
            slow.assign(self.momentum * slow + (1 - self.momentum) * fast)
        self.call_count.assign_add(1.0)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "steps": self.call_count}


def main():
    keras.utils.set_random_seed(6)
    x, _ = numbers(60)
    model = Byol()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    pairs = tf.data.Dataset.from_tensor_slices((x, x + 0.1)).shuffle(60, seed=3).batch(16)
    history = model.fit(pairs, epochs=3).history
    return {"history": history, "model": model, "networks": [model.online, model.target]}
