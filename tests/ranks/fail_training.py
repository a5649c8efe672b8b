"""Trains on all ranks until the last one fails: `fail_training.py HOW`. test_failures.py says what must follow."""

import os
import signal
import sys
import threading
import time

import keras
import mapped
import numpy as np

import keras_hpc

how = sys.argv[1]
sharded, local = how == "in-update", how == "in-local-step"
keras_hpc.init(shard=False, timeout_seconds=6, stall_seconds=2, shard_optimizer=sharded)
if local:
    keras_hpc.configure_team(0, schedule="local", every=4)
mapped.tell()
failing = keras_hpc.rank() == keras_hpc.size() - 1


class Fail(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not failing or batch != 5:
            return
        sys.stdout.write(f"FAILS AT {time.time()}\n")
        sys.stdout.flush()
        if how == "raise":
            raise RuntimeError("boom on the last rank")
        if how == "exit":
            sys.exit(3)
        if how == "raise-exit":
            raise SystemExit(3)
        if how == "exit-text":
            sys.exit("bad luck on the last rank")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "thread":
            # A background thread of the user's dies; the rank's main thread then waits for it in vain.
            worker = threading.Thread(target=lambda: 1 / 0)
            worker.start()
            worker.join()
            raise RuntimeError("boom on the last rank")


if how == "exit-outside-training":
    # The others are in a collective that fit has nothing to do with.
    if failing:
        sys.stdout.write(f"FAILS AT {time.time()}\n")
        raise SystemExit(3)
    keras_hpc.allgather(np.ones(3))


class FailingSGD(keras.optimizers.SGD):
    """Fails in its seventh step: of a sharded optimizer, when gradients are reduced and weights not gathered yet."""

    def update_step(self, gradient, variable, learning_rate):
        if failing and int(self.iterations) == 6:
            sys.stdout.write(f"FAILS AT {time.time()}\n")
            raise RuntimeError("boom on the last rank")
        super().update_step(gradient, variable, learning_rate)


batches = 400
if how in ("fewer-batches", "other-lengths") and failing:
    batches = 7
x = np.random.default_rng(0).normal(size=(4 * batches, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="first"), keras.layers.Dense(1, name="last")])
model.compile(FailingSGD() if sharded or local else "sgd", "mse")
if how == "other-lengths":
    sys.stdout.write(f"FAILS AT {time.time()}\n")
if how == "fewer-batches":  # of a generator nobody knows the length before
    model.fit(((x[i : i + 4], y[i : i + 4]) for i in range(0, len(x), 4)), epochs=1, callbacks=[Fail()], verbose=0)
model.fit(x, y, batch_size=4, epochs=100, callbacks=[Fail()], verbose=0)
sys.stdout.write("trained to the end\n")
