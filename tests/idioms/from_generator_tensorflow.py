"""tf.data of a Python generator, repeated, for so many steps an epoch; pictures changed at random on the way."""

import keras
import numpy as np
import tensorflow as tf
from tiny import compiled

BACKENDS = ("tensorflow",)


def rows():
    random = np.random.default_rng(1)
    for _ in range(48):
        x = random.normal(size=6).astype("float32")
        yield x, int(np.argmax(x[:3]))


def main():
    signature = (tf.TensorSpec((6,), tf.float32), tf.TensorSpec((), tf.int32))
    data = tf.data.Dataset.from_generator(rows, output_signature=signature)
    model = compiled()
    repeated = data.repeat().batch(16).prefetch(tf.data.AUTOTUNE)
    history = model.fit(repeated, steps_per_epoch=3, epochs=2, validation_data=data.batch(16)).history
    noisy = data.map(lambda x, y: (x + tf.random.normal(tf.shape(x)) * 0.01, y)).cache().shuffle(48).batch(16)
    noise = model.fit(noisy, epochs=1).history
    return {"history": history, "_noise": noise, "_model": model, "keras": [len(keras.__version__)]}
