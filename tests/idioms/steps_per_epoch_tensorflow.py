"""A repeated data set, shuffled, with `steps_per_epoch`, and another for validation with `validation_steps`."""

import tensorflow as tf
from tiny import compiled, numbers

BACKENDS = ("tensorflow",)


def main():
    dataset = tf.data.Dataset.from_tensor_slices(numbers())
    model = compiled()
    train = dataset.shuffle(64, seed=3).repeat().batch(16)
    options = {"steps_per_epoch": 3, "validation_data": dataset.repeat().batch(16), "validation_steps": 2}
    return {"history": model.fit(train, epochs=2, **options).history, "model": model}
