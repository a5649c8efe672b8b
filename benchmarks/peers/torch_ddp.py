# SPDX-License-Identifier: Apache-2.0
"""PyTorch's DistributedDataParallel over gloo: around plain PyTorch, or around a Keras model (`--keras`)."""

import os
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import common


def lenet():
    """The 1.2 million parameters of networks.lenet."""
    layers = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))


def mlp():
    """networks.mlp."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(4096, 10))


class ResNet50(nn.Module):
    """That of transformers, without biases in its convolutions. torchvision from PyPI needs a PyTorch for CUDA."""

    def __init__(self):
        from transformers import ResNetConfig, ResNetForImageClassification

        super().__init__()
        self.network = ResNetForImageClassification(ResNetConfig(num_labels=1000))

    def forward(self, x):
        return self.network(x).logits


def main():
    around_keras = "--keras" in sys.argv
    if around_keras:
        sys.argv.remove("--keras")
    args = common.arguments(__doc__)
    os.environ["KERAS_BACKEND"] = "torch"
    _, size = common.rank_and_size()
    torch.manual_seed(1)
    x, y = map(torch.from_numpy, common.batches(args))
    y = y.long()
    if around_keras:
        model = common.keras_model(args)
    else:
        model = {"lenet": lenet, "mlp": mlp, "resnet50": ResNet50}[args.model]()
        if x.ndim == 4:
            x = x.permute(0, 3, 1, 2).contiguous()
    if size > 1:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    model.train()

    def step(number):
        rows = slice(number * args.batch_size, (number + 1) * args.batch_size)
        optimizer.zero_grad()
        output = model(x[rows], training=True) if around_keras else model(x[rows])
        loss = loss_of(output, y[rows])
        loss.backward()
        optimizer.step()
        return loss.item()

    for number in range(min(common.WARM_UP, args.steps)):
        step(number)
    seconds = []
    for number in range(args.steps):
        begin = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - begin)
    common.report(seconds)
    if size > 1:
        # At the end of the process gloo's destructor now and then waits for itself, for good (PyTorch 2.13).
        torch.distributed.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
