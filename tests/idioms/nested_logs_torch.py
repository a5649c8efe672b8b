"""Steps of one's own that return all of `self.metrics`: one of them holds those of `compile`, a dictionary."""

import keras
import torch
from tiny import classifier, numbers

BACKENDS = ("torch",)


class Custom(keras.Model):
    def train_step(self, data):
        x, y = data
        self.zero_grad()
        outputs = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=outputs)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in self.trainable_weights], self.trainable_weights)
        return self.updated(y, outputs, loss)

    def test_step(self, data):
        x, y = data
        outputs = self(x, training=False)
        return self.updated(y, outputs, self.compute_loss(y=y, y_pred=outputs))

    def updated(self, y, outputs, loss):
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, outputs)
        return {m.name: m.result() for m in self.metrics}


def main():
    x, y = numbers()
    inner = classifier()
    model = Custom(inner.inputs, inner.outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x[:32], y[:32])).history
    return {"history": history, "evaluated": model.evaluate(x, y, batch_size=16, return_dict=True), "model": model}
