"""A model that takes batches of one size only, and an odd number of them."""

import keras
import numpy as np
from keras import ops

BACKENDS = ("jax", "tensorflow")
INIT = {"batch": "local"}


def main():
    keras.utils.set_random_seed(13)
    x = np.random.default_rng(6).normal(size=(48, 20)).astype("float32")
    inputs = keras.Input((20,), batch_size=16)
    hidden = keras.layers.Lambda(lambda v: ops.reshape(v, (16, 5, 4)))(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Dense(3)(hidden))))
    model.compile(optimizer="adam", loss="mse")
    history = model.fit(x, x.sum(axis=1), batch_size=16, epochs=2).history
    return {"_history": history, "_evaluated": model.evaluate(x, x.sum(axis=1), batch_size=16), "_model": model}
