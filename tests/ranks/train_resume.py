# SPDX-License-Identifier: Apache-2.0
"""Trains with a checkpoint: `train_resume.py FOLDER HOW STEP SIGNAL`. test_resume.py stops it and starts it again.

HOW: words of "whole" (train undisturbed before, in another folder), "pipelined", "accumulate", "dataset", "large" (13
MB to save), with commas between them. STEP: after so many steps the last rank sends itself SIGNAL, or all ranks do
where that is in capitals; 0: never. "wait" as SIGNAL says so on stdout instead and trains slowly from then on; with
"later" one of the ranks is killed at any moment soon after, with "writing" when it then sees a checkpoint being
written. At the end the first rank writes FOLDER/whole.json and FOLDER/run.json.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np

import keras_hpc

folder, how, step, name = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4]
random = np.random.default_rng(3)
x, y = random.normal(size=(185, 10)).astype("float32"), random.integers(0, 3, 185)


class Signal(keras.callbacks.Callback):
    left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if name in ("wait", "later") and self.left < 0 < step:
            time.sleep(0.2 if name == "wait" else 0.005)
        elif self.left != 0:
            return
        elif name == "wait":
            sys.stdout.write("TRAINS\n")
            sys.stdout.flush()
        elif name == "later":
            if keras_hpc.rank() == step % keras_hpc.size():
                moment = np.random.default_rng().uniform(0, 0.03)
                threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif name == "writing":
            if keras_hpc.rank() == step % keras_hpc.size():
                threading.Thread(target=die_while_writing, daemon=True).start()
        elif keras_hpc.rank() == keras_hpc.size() - 1 or name.isupper():
            os.kill(os.getpid(), getattr(signal, name.upper()))


def die_while_writing():
    while not list((folder / "run").glob(".unfinished-step*")):
        time.sleep(1e-4)
    time.sleep(np.random.default_rng().uniform(0, 0.03))
    os.kill(os.getpid(), signal.SIGKILL)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return x[24 * index : 24 * (index + 1)], y[24 * index : 24 * (index + 1)]


def train(part, callbacks):
    keras_hpc.init(batch="global", timeout_seconds=60)
    if "pipelined" in how:
        keras_hpc.configure_team(0, schedule="pipelined", synchronous_steps=3, cooldown_steps=4)
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((10,)),
        keras.layers.Dense(16, activation="relu"),
        *[keras.layers.Dense(width, activation="tanh") for width in ((1000, 1000, 64) if "large" in how else ())],
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3 if "accumulate" in how else None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    data = {"x": Batches()} if "dataset" in how else {"x": x, "y": y, "batch_size": 24}
    callbacks = [*callbacks, keras_hpc.callbacks.Checkpoint(folder / part, every_steps=3)]
    history = model.fit(**data, epochs=4, verbose=0, callbacks=callbacks)
    if keras_hpc.rank() == 0:
        values = [keras.ops.convert_to_numpy(v) for v in (*model.weights, *model.optimizer.variables)]
        digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
        result = {"digest": digest, "history": history.history, "epochs": history.epoch}
        (folder / f"{part}.json").write_text(json.dumps(result))


if "whole" in how:
    train("whole", [])
    keras_hpc.finalize()
    keras.utils.clear_session()
train("run", [Signal()])
