"""A loop around train_on_batch and test_on_batch, with weights of classes, and a rate that the loop sets."""

import numpy as np
from tiny import compiled, numbers

BACKENDS = ("torch", "jax", "tensorflow")


def main():
    x, y = numbers(60)
    model, logs = compiled(optimizer="sgd"), []
    for epoch in range(2):
        model.optimizer.learning_rate = 0.1 / (1 + epoch)
        for begin in range(0, 60, 16):
            batch = slice(begin, begin + 16)
            log = model.train_on_batch(x[batch], y[batch], class_weight={0: 1.0, 1: 2.0, 2: 0.5}, return_dict=True)
            logs.append([log["loss"], log["accuracy"]])
        model.reset_metrics()
        logs.append(model.test_on_batch(x[:32], y[:32]))
    return {"logs": np.asarray(logs), "guess": model.predict_on_batch(x[:5]), "model": model}
