"""Loops of one's own over a DataLoader: with an optimizer of Keras, and with one of `torch.optim`."""

import keras
import torch
from tiny import classifier, numbers

import keras_hpc

BACKENDS = ("torch",)


def train(make_update):
    model = classifier()
    update = make_update(model)
    dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, numbers()))
    loader = torch.utils.data.DataLoader(dataset, batch_size=16 // keras_hpc.size())
    losses = []
    for _ in range(2):
        for x, y in keras_hpc.shard(loader):
            with keras_hpc.step(samples=len(x)):
                model.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y.long())
                loss.backward()
                update()
            losses.append(keras_hpc.allreduce(float(loss.detach())))
    return losses, model


def with_keras(model):
    optimizer = keras.optimizers.Adam(0.01)

    def update():
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_weights], model.trainable_weights)

    return update


def main():
    ours, first = train(with_keras)
    theirs, second = train(lambda model: torch.optim.Adam(model.parameters(), lr=0.01).step)
    return {"keras": ours, "torch.optim": theirs, "models": [first, second]}
