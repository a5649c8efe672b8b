"""SwapEMAWeights: validation and checkpoints see the averaged weights."""

import keras
from tiny import compiled, numbers

BACKENDS = ("jax",)


def main():
    x, y = numbers()
    model = compiled(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
    callbacks = [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.ModelCheckpoint("best.weights.h5", save_weights_only=True),
    ]
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), callbacks=callbacks).history
    return {"history": history, "model": model}
