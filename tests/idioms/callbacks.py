"""What decides by metrics or writes files: all ranks decide alike, and each file is written once."""

import csv

import keras
from tiny import compiled, numbers

import keras_hpc

BACKENDS = ("tensorflow", "torch")


def main():
    x, y = numbers()
    model = compiled(optimizer=keras.optimizers.SGD(0.5))
    callbacks = keras.callbacks
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=6,
        validation_data=(x[:16], 2 - y[:16]),  # gets worse
        callbacks=[
            callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
            callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1),
            callbacks.ModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True),
            callbacks.CSVLogger("log.csv"),
            callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs)),
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        ],
    ).history
    keras_hpc.barrier()
    best = keras.saving.load_model("best.keras")
    with open("log.csv") as file:
        rows = list(csv.DictReader(file))
    logged = [float(row["val_loss"]) for row in rows]
    return {
        "history": history,
        "logged": logged,
        "evaluated": best.evaluate(x, y, batch_size=16),
        "models": [model, best],
    }
