"""Reduces arrays until the last rank fails in the middle of a call: `fail_calls.py HOW`. See test_failures.py."""

import os
import signal
import sys
import threading
import time

import mapped
import numpy as np

import keras_hpc

how = sys.argv[1]
keras_hpc.init(timeout_seconds=4, stall_seconds=1)
mapped.tell()
x = np.ones(20_000_000, np.float32)
keras_hpc.allreduce(x, "mean", out=x)
failing = keras_hpc.rank() == keras_hpc.size() - 1


def fail():
    time.sleep(1)
    sys.stdout.write(f"FAILS AT {time.time()}\n")
    sys.stdout.flush()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def exit_held():
    """Ends this rank by an exception that refers to itself: a frame of its traceback holds it."""
    try:
        sys.exit(7)
    finally:
        held = sys.exc_info()[1]  # noqa: F841


if failing and how in ("leave", "exit"):
    sys.stdout.write(f"FAILS AT {time.time()}\n")
    sys.stdout.flush()
    if how == "exit":
        exit_held()
    raise SystemExit(0)
if failing:
    threading.Thread(target=fail).start()
end = time.monotonic() + 1.5
while True:
    keras_hpc.allreduce(x, "mean", out=x)
    if how == "stop-calling" and failing and time.monotonic() > end:
        time.sleep(60)
