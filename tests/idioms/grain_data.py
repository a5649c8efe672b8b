"""A pipeline of Grain: shuffled with a seed, mapped, in batches."""

from tiny import compiled, numbers

BACKENDS = ("jax",)
NEEDS = ("grain",)


def main():
    import grain

    x, y = numbers()
    dataset = grain.MapDataset.range(64).shuffle(seed=3).map(lambda i: (x[i], y[i])).batch(16)
    model = compiled()
    history = model.fit(dataset.to_iter_dataset(), epochs=2).history
    return {"history": history, "evaluated": model.evaluate(dataset.to_iter_dataset()), "model": model}
