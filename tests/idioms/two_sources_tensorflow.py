"""Domain adaptation: a step of one's own over two data sets side by side, two gradients of one tape, two optimizers."""

import keras
import tensorflow as tf
from tiny import numbers

BACKENDS = ("tensorflow",)


class Adapter(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(8, activation="relu")
        self.labels, self.domains = keras.layers.Dense(3), keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean("loss")

    def compile(self, encoder_optimizer, domain_optimizer):
        super().compile()
        self.encoder_optimizer, self.domain_optimizer = encoder_optimizer, domain_optimizer

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        return self.labels(self.encoder(x))

    def train_step(self, data):
        (source, y), target = data
        with tf.GradientTape(persistent=True) as tape:
            features, others = self.encoder(source), self.encoder(target)
            task = keras.losses.sparse_categorical_crossentropy(y, self.labels(features), from_logits=True)
            task = keras.ops.mean(task)
            known = keras.ops.sigmoid(self.domains(features))
            unknown = keras.ops.sigmoid(self.domains(others))
            domain = keras.ops.mean(keras.ops.square(known - 1.0)) + keras.ops.mean(keras.ops.square(unknown))
            loss = task - 0.1 * domain
        main = self.encoder.trainable_variables + self.labels.trainable_variables
        self.encoder_optimizer.apply_gradients(zip(tape.gradient(loss, main), main, strict=True))
        side = self.domains.trainable_variables
        self.domain_optimizer.apply_gradients(zip(tape.gradient(domain, side), side, strict=True))
        del tape
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def main():
    keras.utils.set_random_seed(3)
    x, y = numbers(64)
    source = tf.data.Dataset.from_tensor_slices((x[:32], y[:32])).batch(8)
    target = tf.data.Dataset.from_tensor_slices(x[32:] + 1.0).batch(8)
    model = Adapter()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1))
    history = model.fit(tf.data.Dataset.zip((source, target)), epochs=2).history
    return {"history": history, "model": model}
