# SPDX-License-Identifier: Apache-2.0
"""Epochs on a file that is read slowly, with and without `keras_hpc.data.stage`, beside epochs from memory.

    mpiexec -n 2 python -m benchmarks.reading --megabytes 200 --source-mb-per-s 50

Reading is made slow by a pause after each read, so that the ranks of a node together get as many MB/s. Each batch is
worked on for `--step-ms` beside what Keras needs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

_WIDTH = 16 << 10  # float32: 64 KiB a sample
_BATCH = 32


def main() -> None:
    """Prints a line for each epoch, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200, help="size of the file (default: 200)")
    parser.add_argument("--source-mb-per-s", type=float, default=50, help="speed of reading on a node (default: 50)")
    parser.add_argument("--step-ms", type=float, default=20, help="of work on a batch (default: 20)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the file and the cache (default: one for temporary files)")
    arguments = parser.parse_args()

    import keras

    import keras_hpc
    from keras_hpc.data import files
    from keras_hpc.data.stores import Store

    keras_hpc.init()
    samples = max(_BATCH, int(arguments.megabytes * 1e6) // (4 * _WIDTH))

    class InMemory(Store):
        path, spec, block = "memory", {"x": ((_WIDTH,), "float32")}, 16

        def __init__(self, rows: np.ndarray) -> None:
            self._rows = rows

        def __len__(self) -> int:
            return len(self._rows)

        def read(self, start: int, stop: int) -> Any:
            return {"x": self._rows[start:stop]}

    class Epochs(keras.callbacks.Callback):
        """Shows how long epochs take, and what this node reads in them."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.read = _read()  # Keras takes a first batch before the first epoch

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            keras_hpc.barrier()
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(arguments.step_ms / 1e3)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            keras_hpc.barrier()
            seconds, before, self.read = time.perf_counter() - self.began, self.read, _read()
            if keras_hpc.rank() == 0:
                megabytes = (self.read - before) / 1e6
                print(f"{self.name:<10} epoch {epoch}: {seconds:6.2f} s, {megabytes:7.1f} MB read", flush=True)

    def _read() -> int:
        read = keras_hpc.data.traffic()["read"]
        if files.reader() is None:  # then it is this rank's own
            read = sum(keras_hpc.allgather_object(read)[:: max(1, keras_hpc.size() // keras_hpc.local_size())])
        return int(read)

    def train(name: str, source: Any) -> None:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((_WIDTH,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-9), "mse")
        rows = keras_hpc.data.Dataset(source, _BATCH, decode=_with_targets, block=16)
        model.fit(rows, epochs=arguments.epochs, callbacks=[Epochs(name)], verbose=0)

    with tempfile.TemporaryDirectory(dir=arguments.folder) as own:
        folder = Path(keras_hpc.broadcast_object(own))
        path = folder / "x.npy"
        if keras_hpc.local_rank() == 0:
            folder.mkdir(exist_ok=True)
            np.save(path, np.random.default_rng(0).normal(size=(samples, _WIDTH)).astype("float32"))
        keras_hpc.barrier()
        train("memory", InMemory(np.load(path)))
        _make_slow(files.Source, arguments.source_mb_per_s * 1e6 / keras_hpc.local_size())
        train("file", path)
        keras_hpc.data.stage(folder, 2 * os.path.getsize(path))
        train("staged", path)
        keras_hpc.barrier()
    keras_hpc.finalize()


def _with_targets(rows: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    (x,) = rows.values()
    return x, x[:, :1]


def _make_slow(source: type, bytes_per_s: float) -> None:
    read_into, alone = source.read_into, threading.Lock()

    def slowly(self: Any, offset: int, view: memoryview) -> None:
        with alone:
            begin = time.perf_counter()
            read_into(self, offset, view)
            time.sleep(max(0.0, len(view) / bytes_per_s - (time.perf_counter() - begin)))

    source.read_into = slowly


if __name__ == "__main__":
    main()
