"""A step of one's own in JAX that splits random keys, scans, and returns what it likes."""

import jax
import keras
from tiny import numbers

BACKENDS = ("jax",)


class Noisy(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)
        self.seeds = keras.random.SeedGenerator(5)
        self.tracker = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x, training=False):
        hidden = self.hidden(x)
        hidden, _ = keras.ops.scan(lambda carry, _: (carry * 0.9, None), hidden, length=2)
        return self.out(hidden)

    def stateless_loss(self, trainable, others, x, y):
        logits, others = self.stateless_call(trainable, others, x, training=True)
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)), others

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        x, y = data
        (loss, others), gradients = jax.value_and_grad(self.stateless_loss, has_aux=True)(trainable, others, x, y)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        metrics = self.tracker.stateless_update_state(metrics, loss)
        return {"loss": self.tracker.stateless_result(metrics)}, (trainable, others, optimizer, metrics)


def main():
    keras.utils.set_random_seed(3)
    x, y = numbers(64)
    model = Noisy()
    model.compile(keras.optimizers.Lion(0.01))
    return {"history": model.fit(x, y, batch_size=16, epochs=2).history, "model": model}
