"""A part of the arrays held back, `initial_epoch`, `steps_per_execution`, and training that goes on."""

from tiny import compiled, numbers

BACKENDS = ("jax",)


def main():
    x, y = numbers(70)
    model = compiled(steps_per_execution=2)
    first = model.fit(x, y, batch_size=16, epochs=1, validation_split=0.2, validation_freq=1).history
    second = model.fit(x, y, batch_size=16, epochs=3, initial_epoch=1, validation_split=0.2).history
    return {"first": first, "second": second, "model": model}
