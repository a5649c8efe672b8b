"""A trained model is quantized to int8; then predicted and evaluated with."""

from tiny import compiled, numbers

BACKENDS = ("jax",)
TOLERANCE = 0.05  # of a rounded number a last bit is one in 127


def main():
    x, y = numbers()
    model = compiled()
    model.fit(x, y, batch_size=16, epochs=2)
    model.quantize("int8")
    model.compile(loss=model.loss, metrics=["accuracy"])
    return {
        "predicted": model.predict(x, batch_size=16),
        "evaluated": model.evaluate(x, y, batch_size=16),
        "model": model,
    }
