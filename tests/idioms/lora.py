"""Fine-tuning: the layers of a trained model are frozen but for their low-rank additions."""

from tiny import compiled, numbers

BACKENDS = ("torch", "tensorflow")


def main():
    x, y = numbers()
    model = compiled()
    model.fit(x, y, batch_size=16, epochs=1)
    for layer in model.layers:
        layer.enable_lora(2)
    model.compile(optimizer="adam", loss=model.loss, metrics=["accuracy"])
    return {"history": model.fit(x, y, batch_size=16, epochs=2).history, "model": model}
