# SPDX-License-Identifier: Apache-2.0
"""What each rank of `keras-hpc demo` runs."""

import argparse
import json
import time
from pathlib import Path

import keras
import numpy as np
import xxhash

import keras_hpc


class _Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes how long each epoch's training steps take."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.begin = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.seconds.append(time.perf_counter() - self.begin)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 1,797 images of shape (8, 8, 1), float32 from 0 to 1, and their classes, int32.

    The test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine Learning
    Repository, 1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0; pixels are kept as integers from 0 to 16.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        return file["x"][..., None].astype("float32") / 16, file["y"].astype("int32")


def main() -> None:
    """Train, and let the first rank write what came of it. Collective."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    keras_hpc.init(batch="global")
    keras.utils.set_random_seed(1)
    x, y = digits()
    test = np.arange(len(x)) % 5 == 0
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(2e-3), loss=loss, metrics=["accuracy"])
    clock = _Clock()
    history = model.fit(x[~test], y[~test], batch_size=64, epochs=arguments.epochs, callbacks=[clock], verbose=0)
    _, accuracy = model.evaluate(x[test], y[test], verbose=0)
    keras_hpc.check_replicas(model)
    if keras_hpc.rank() == 0:
        bits = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
        result = {
            "ranks": keras_hpc.size(),
            # The first epoch compiles, the second finds caches cold.
            "samples_per_second": int((~test).sum()) / float(np.median(clock.seconds[2:])),
            "loss": history.history["loss"][-1],
            "test_accuracy": accuracy,
            "hash": xxhash.xxh3_64_hexdigest(bits),
        }
        arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
