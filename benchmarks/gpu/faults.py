# SPDX-License-Identifier: Apache-2.0
"""C2: a rank that raises, ends or comes late in the middle of a step leaves no job and no GPU hung.

`python -m benchmarks.gpu.faults COMMAND...`: COMMAND starts Python on two ranks: `mpiexec -n 2 python`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu import say

_LIMIT_SECONDS = 90.0


def main(command: list[str]) -> None:
    """Start a job for each fault, and look whether the GPU still works."""
    python = command[command.index("-n") + 2 :]
    for fault, fails in (("raise", True), ("exit", True), ("late", False)):
        begin = time.monotonic()
        job = subprocess.Popen(
            [*command, "-m", "benchmarks.gpu.faults", "rank", fault],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            status: int | None = None
            said = job.communicate(timeout=_LIMIT_SECONDS)[1]
            status = job.returncode
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            said = job.communicate()[1]
        took = time.monotonic() - begin
        holds = status is not None and (status != 0) == fails
        say("C2", f"a rank's fault in a step: {fault}; the job ends as it should", took, "s", "no hang", holds=holds)
        if not holds:
            sys.stderr.write(f"{fault}: status {status}\n{said[-3000:]}\n")
        begin = time.monotonic()
        look = "from keras_hpc import _native; _native.device_speeds(0, 1 << 20)"
        try:
            worked = subprocess.run([*python, "-c", look], timeout=30, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            worked = False
        say("C2", f"after it the GPU works for a new process: {fault}", time.monotonic() - begin, "s", holds=worked)


def rank(fault: str) -> None:
    """Train, and meet the fault on rank 1."""
    import keras
    import numpy as np

    import keras_hpc

    keras_hpc.init(timeout_seconds=30)

    class Fault(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch != 3 or keras_hpc.rank() != 1:
                return
            if fault == "raise":
                raise RuntimeError("a fault on rank 1")
            if fault == "exit":
                os._exit(7)
            time.sleep(5)

    x = np.random.default_rng(0).normal(size=(256, 64)).astype("float32")
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512, activation="relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x.sum(axis=1, keepdims=True), batch_size=8, verbose=0, callbacks=[Fault()])


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(sys.argv[2])
    else:
        main(sys.argv[1:])
