"""Lets other ranks wait: `fail_waiting.py [--fit] [--logs FOLDER] HOW:RANK[:SECONDS]...`. See test_watchdog.py.

The ranks reduce the plan "gradients", or train. At steps 4, 8, ... a rank does what it is told, for so long or for
ever; with a comma between them several do.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import keras_hpc

parser = argparse.ArgumentParser()
parser.add_argument("--fit", action="store_true", help="train with Keras")
parser.add_argument("--logs", type=Path, help="stderr of each rank goes into a file of its own")
parser.add_argument("cases", nargs="+")
arguments = parser.parse_args()
keras_hpc.init(shard=False, timeout_seconds=4, stall_seconds=0.5)
if arguments.logs:
    os.dup2(os.open(arguments.logs / f"rank{keras_hpc.rank()}.txt", os.O_WRONLY | os.O_CREAT), 2)


def case(step):
    """What a rank does before it goes on to the next step."""
    number = step // 4 - 1
    if step % 4 or not 0 <= number < len(arguments.cases):
        return
    for one in arguments.cases[number].split(","):
        how, rank, *seconds = one.split(":")
        if keras_hpc.rank() != int(rank):
            continue
        if not seconds:
            sys.stdout.write(f"FAILS AT {time.time()}\n")
            sys.stdout.flush()
        misbehave(how, float(seconds[0]) if seconds else 1000.0)


def misbehave(how, seconds):
    end = time.monotonic() + seconds
    if how == "sleep":
        time.sleep(seconds)  # the line of sleep
    elif how == "loop":
        loop(end)  # the line of loop
    elif how == "native":
        while time.monotonic() < end:
            hold_the_gil(int(end - time.monotonic()) + 1)
    elif how == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "skip":
        keras_hpc.barrier()  # the line of skip
    else:
        raise ValueError(how)


def loop(end):
    while time.monotonic() < end:
        pass


def hold_the_gil(seconds):
    import ctypes

    ctypes.PyDLL(None).sleep(seconds)


def reduce():
    from keras_hpc.job import current
    from keras_hpc.job.plan import TensorSpec

    plan = current.job().teams[0].plan("gradients", [TensorSpec(name, (5,), "float32") for name in ("kernel", "bias")])
    for step in range(1, 4 * len(arguments.cases) + 4):
        case(step)
        for tensor in range(2):
            plan.start(tensor, np.ones(5, np.float32))
        for tensor in range(2):
            plan.wait(tensor)


def fit():
    import keras

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            case(batch + 1)

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, name="last")])
    model.compile("sgd", "mse")
    model.fit(np.ones((400, 8), "float32"), np.ones((400, 1), "float32"), batch_size=4, callbacks=[Fail()], verbose=0)


fit() if arguments.fit else reduce()
sys.stdout.write("went on to the end\n")
