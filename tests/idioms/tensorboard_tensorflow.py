"""TensorBoard: curves, histograms and the graph, written once."""

from pathlib import Path

import keras
from tiny import compiled, numbers

import keras_hpc

BACKENDS = ("tensorflow",)
NEEDS = ("tensorboard",)


def main():
    x, y = numbers()
    model = compiled()
    board = keras.callbacks.TensorBoard("logs", histogram_freq=1, update_freq="batch")
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), callbacks=[board]).history
    keras_hpc.barrier()
    return {"history": history, "files": len(list(Path("logs").rglob("events*"))), "model": model}
