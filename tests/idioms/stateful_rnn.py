"""A recurrent network that keeps its state from batch to batch, reset between epochs, by hand."""

import keras
import numpy as np

BACKENDS = ("jax", "tensorflow")
INIT = {"batch": "local"}


def main():
    keras.utils.set_random_seed(14)
    x = np.random.default_rng(6).normal(size=(64, 5, 2)).astype("float32")
    recurrent = keras.layers.LSTM(4, stateful=True)
    model = keras.Sequential([keras.Input((5, 2), batch_size=16), recurrent, keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    losses = []
    for _ in range(2):
        losses += model.fit(x, x[:, -1, 0], batch_size=16, epochs=1, shuffle=False).history["loss"]
        recurrent.reset_states()
    return {"_losses": losses, "_predicted": model.predict(x, batch_size=16), "_model": model}
