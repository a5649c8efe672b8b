"""A split that nobody has seeded: indices shuffled by np.random, files by `random`. All ranks must make the same."""

import random

import numpy as np
from tiny import compiled, numbers

BACKENDS = ("jax",)


def main():
    x, y = numbers()
    indices = np.arange(64)
    np.random.shuffle(indices)
    files = [f"{index}.png" for index in range(8)]
    random.shuffle(files)
    train, valid = indices[:48], indices[48:]
    model = compiled()
    history = model.fit(x[train], y[train], batch_size=16, epochs=2, validation_data=(x[valid], y[valid])).history
    # Not what one rank draws, but on all ranks the same: the order decides what is learned.
    return {
        "_history": history,
        "rows": sorted(indices.tolist()),
        "_files": [int(f[0]) for f in files],
        "_model": model,
    }
