"""Steps of one's own that return all of `self.metrics`: one of them holds those of `compile`, a dictionary."""

import jax
import keras
from tiny import classifier, numbers

BACKENDS = ("jax",)


class Custom(keras.Model):
    def train_step(self, state, data):
        trainable, fixed, optimizer, metrics = state
        x, y = data

        def forward(weights):
            outputs, updated = self.stateless_call(weights, fixed, x, training=True)
            return self.compute_loss(x, y, outputs), (outputs, updated)

        (loss, (outputs, fixed)), gradients = jax.value_and_grad(forward, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = self.updated(metrics, y, outputs, loss)
        return logs, (trainable, fixed, optimizer, metrics)

    def test_step(self, state, data):
        trainable, fixed, metrics = state
        x, y = data
        outputs, fixed = self.stateless_call(trainable, fixed, x, training=False)
        logs, metrics = self.updated(metrics, y, outputs, self.compute_loss(x, y, outputs))
        return logs, (trainable, fixed, metrics)

    def updated(self, values, y, outputs, loss):
        logs, new = {}, []
        for metric in self.metrics:
            mine = values[len(new) : len(new) + len(metric.variables)]
            what = (loss,) if metric.name == "loss" else (y, outputs)
            mine = metric.stateless_update_state(mine, *what)
            logs[metric.name] = metric.stateless_result(mine)
            new += mine
        return logs, new


def main():
    x, y = numbers()
    inner = classifier()
    model = Custom(inner.inputs, inner.outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x[:32], y[:32])).history
    return {"history": history, "evaluated": model.evaluate(x, y, batch_size=16, return_dict=True), "model": model}
