"""A loss that is summed over the batch, beside a mean, of a model with two named outputs and loss weights."""

import keras
from tiny import numbers

BACKENDS = ("jax", "torch")


def main():
    keras.utils.set_random_seed(4)
    x, y = numbers()
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="relu")(inputs)
    outputs = {name: keras.layers.Dense(n, name=name)(hidden) for name, n in (("kind", 3), ("size", 1))}
    model = keras.Model(inputs, outputs)
    losses = {
        "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
        "size": keras.losses.Huber(),
    }
    sgd = keras.optimizers.SGD(0.01)
    model.compile(optimizer=sgd, loss=losses, loss_weights={"kind": 0.1, "size": 1.0}, metrics={"kind": ["accuracy"]})
    targets = {"kind": y, "size": x.sum(axis=1, keepdims=True)}
    return {"history": model.fit(x, targets, batch_size=16, epochs=2).history, "model": model}
