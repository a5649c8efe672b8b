# SPDX-License-Identifier: Apache-2.0
"""Trains with eight virtual ranks; rank 0 says with which bits it ends, and how long a step took.

`train_virtual.py [FOLDER [STEPS [SECONDS]]]`: with a checkpoint in FOLDER every so many STEPS, and so many SECONDS
before each step. A rank whose number is in the file FOLDER.kill kills itself before the step whose number is behind it
there, once.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import keras_hpc

keras_hpc.init(virtual_ranks=8, device="cpu")
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
KILL = folder and Path(f"{folder}.kill")
PAUSE = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
random = np.random.default_rng(7)
X = random.normal(size=(520, 16, 16, 3)).astype("float32")
Y = np.argmax(X[:, 0, :10, 0] + 0.1 * random.normal(size=(520, 10)), axis=1).astype("int32")
keras.utils.set_random_seed(5)
model = keras.Sequential(
    [
        keras.Input((16, 16, 3)),
        keras.layers.GaussianNoise(0.1),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Dropout(0.2),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])


class Watch(keras.callbacks.Callback):
    """Notes the times of steps, and kills a rank."""

    def __init__(self):
        super().__init__()
        self.times = []
        self.begun, self.epoch = 0.0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(PAUSE)
        self.begun = time.perf_counter()
        if KILL is not None and KILL.exists():
            rank, step = map(int, KILL.read_text().split())
            if (rank, step) == (keras_hpc.rank(), self.params["steps"] * self.epoch + batch):
                KILL.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter() - self.begun)


watch = Watch()
callbacks = [watch]
if folder:
    callbacks.append(keras_hpc.callbacks.Checkpoint(folder, every_steps=int(sys.argv[2]) if sys.argv[2:] else None))
history = model.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
values = [keras.ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]
digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
if keras_hpc.rank() == 0:
    said = {"ranks": keras_hpc.size(), "digest": digest, "step": float(np.median(watch.times))}
    sys.stdout.write(json.dumps(said) + "\n")
