"""A search: models of different sizes and rates are trained in turn, and the best is kept, loaded and trained on."""

import keras
from tiny import numbers

BACKENDS = ("jax",)


def build(units, rate):
    keras.utils.set_random_seed(units)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, activation="relu"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(rate), loss=loss, metrics=["accuracy"])
    return model


def main():
    x, y = numbers()
    best = None
    for trial, (units, rate) in enumerate([(2, 0.01), (8, 0.03), (4, 0.001)]):
        model = build(units, rate)
        checkpoint = keras.callbacks.ModelCheckpoint(
            f"trial{trial}.weights.h5", monitor="val_loss", save_best_only=True, save_weights_only=True
        )
        model.fit(x, y, batch_size=16, epochs=2, validation_data=(x[:32], y[:32]), callbacks=[checkpoint])
        score = model.evaluate(x, y, batch_size=16)[0]
        if best is None or score < best[0]:
            best = score, units, rate, trial
    model = build(*best[1:3])
    model.load_weights(f"trial{best[3]}.weights.h5")
    return {"best": best, "loss": model.fit(x, y, batch_size=16).history["loss"], "model": model}
