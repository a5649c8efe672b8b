"""An optimizer that averages weights itself, and overwrites them now and then; clipping and weight decay beside it."""

import keras
from tiny import compiled, numbers

BACKENDS = ("torch", "tensorflow")


def main():
    x, y = numbers()
    adam = keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3, global_clipnorm=0.5)
    model = compiled(optimizer=adam)
    return {"history": model.fit(x, y, batch_size=16, epochs=2).history, "model": model}
