# SPDX-License-Identifier: Apache-2.0
"""Convolutions on an image of two ranks: PyTorch's DTensor over gloo beside keras_hpc with `spatial=(2, 1)`.

    OMP_NUM_THREADS=1 mpiexec -n 2 python -m benchmarks.dtensor --size 512

First it says, layer by layer, what DTensor does with an image that is sharded by rows, `Shard(2)`, or columns,
`Shard(3)`: right, if outputs and gradients are those of one process; or what is wrong, in PyTorch's words where it has
some. That is tried as PyTorch is, and with two mends, which `mended` describes. Then each line of JSON is a network,
with steps of training of both in turns, one thread a rank: the network of benchmarks/parts.py, and one of as many
convolutions that DTensor can run with the mends, whose strided convolutions are 2 x 2 without padding. Times are those
of the slowest rank, medians; where DTensor cannot run a network, the line says why.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, _tp_conv, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional

from benchmarks import turns

CHANNELS = 18
STAGES = ((32, 5), (32, 3), (64, 3), (64, 3), (128, 3), (128, 3))  # filters, kernel: of benchmarks/parts.py
SMALL = 128  # cells along each side of the images that layers are tried on
TOLERANCE = 1e-4  # of the largest value
_WARM_UP = 2
_TIMEOUT_S = 120
_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError)  # that DTensor raises where it cannot do something


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """Mend two errors of DTensor's convolution in PyTorch 2.13 for a while.

    A newer rule says that outputs are whole on each rank, although each computes its part: the older one, which is
    still there, is used instead. And the function that adds up gradients at the border, in place, returns None: here it
    returns what it has added up, without the columns of the neighbours.
    """
    rules = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    convolutions = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
    newer = {op: rules.pop(op) for op in convolutions if op in rules}
    add_up = _tp_conv._ring_send_recv_aggregate

    def returned(gradient: Any, d1: int, d2: int, left: int, right: int, rank: int, size: int) -> Any:
        added = add_up(gradient, d1, d2, left, right, rank, size)
        begin, end = (d1 if rank else 0), gradient.shape[-1] - (d2 if rank < size - 1 else 0)
        return gradient[..., begin:end] if added is None else added

    _tp_conv._ring_send_recv_aggregate = returned
    _clear_sharding_prop_cache()
    try:
        yield
    finally:
        _tp_conv._ring_send_recv_aggregate = add_up
        rules.update(newer)
        _clear_sharding_prop_cache()


class ShardedBatchNorm(nn.BatchNorm2d):
    """BatchNorm2d, whose output DTensor shards by channels, sharded again as its input."""

    def forward(self, x: Any) -> Any:
        """Normalize x."""
        y = super().forward(x)
        return y.redistribute(placements=x.placements) if isinstance(x, DTensor) else y


def stack(runnable: bool, batch_norm: bool) -> nn.Sequential:
    """Return the network of benchmarks/parts.py, or the one like it that DTensor can run.

    Args:
        runnable: strided convolutions are 2 x 2 and without padding.
        batch_norm: normalize after each convolution.
    """
    layers: list[nn.Module] = []
    channels = CHANNELS
    for filters, kernel in STAGES:
        for stride in (2, 1):
            size, padding = (2, 0) if runnable and stride == 2 else (kernel, kernel // 2)
            layers.append(nn.Conv2d(channels, filters, size, stride, padding, bias=False))
            layers += [ShardedBatchNorm(filters)] if batch_norm else []
            layers.append(nn.ReLU())
            channels = filters
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 1))


def keras_stack(size: int, runnable: bool, batch_norm: bool) -> Any:
    """Return the same network of Keras, compiled."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(1)
    inputs = x = keras.Input((size, size, CHANNELS))
    for filters, kernel in STAGES:
        for strides in (2, 1):
            shape = {"kernel_size": kernel, "padding": "same"}
            if runnable and strides == 2:
                shape = {"kernel_size": 2, "padding": "valid"}
            x = layers.Conv2D(filters, strides=strides, use_bias=False, **shape)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x) if batch_norm else x)
    model = keras.Model(inputs, layers.Conv2D(1, 1)(x))
    model.compile(keras.optimizers.SGD(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def layers_to_try() -> dict[str, nn.Module]:
    """Return the layers, and networks, that DTensor is tried on."""
    return {
        "convolution 1 x 1": nn.Conv2d(CHANNELS, 8, 1),
        "convolution 2 x 2, stride 2, no padding": nn.Conv2d(CHANNELS, 8, 2, 2, bias=False),
        "convolution 3 x 3, padding 1": nn.Conv2d(CHANNELS, 8, 3, padding=1, bias=False),
        "convolution 3 x 3, stride 2, padding 1": nn.Conv2d(CHANNELS, 8, 3, 2, 1, bias=False),
        "convolution 3 x 3, dilation 2, padding 2": nn.Conv2d(CHANNELS, 8, 3, padding=2, dilation=2, bias=False),
        "BatchNorm2d": ShardedBatchNorm(CHANNELS),
        "max pooling 2 x 2": nn.MaxPool2d(2),
        "network of benchmarks/parts.py": stack(runnable=False, batch_norm=False),
        "network with strides 2 x 2": stack(runnable=True, batch_norm=False),
        "the same with BatchNorm2d": stack(runnable=True, batch_norm=True),
    }


def verdict(layer: nn.Module, mesh: Any, dimension: int) -> str:
    """Say what DTensor does with a layer: right, or what is wrong. Collective.

    Args:
        layer: with the same weights on all ranks.
        mesh: of the ranks.
        dimension: that the image is sharded along.
    """
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(1, CHANNELS, SMALL, SMALL, generator=generator)
    alone, x = copy.deepcopy(layer), image.clone().requires_grad_()
    expected = alone(x)
    weights = torch.randn(expected.shape, generator=generator)
    (expected * weights).sum().backward()
    wrong = ""
    try:
        module = distribute_module(copy.deepcopy(layer), mesh)
        sharded = distribute_tensor(image, mesh, [Shard(dimension)]).requires_grad_()
        output = module(sharded)
        claimed, local = _local_shape(output, mesh), tuple(output.to_local().shape)
        if local != claimed:
            wrong = f"wrong: a rank has {local} of an output that is {output.placements[0]!r}, so {claimed}; then "
        elif not _equal(output.full_tensor(), expected):
            return "wrong: output"
        (output * distribute_tensor(weights, mesh, output.placements)).sum().backward()
        pairs = [(sharded, x), *zip(module.parameters(), alone.parameters(), strict=True)]
        if any(ours.grad is None for ours, _ in pairs):
            return "wrong: no gradient of the input"
        if not all(_equal(ours.grad.full_tensor(), theirs.grad) for ours, theirs in pairs):
            return "wrong: gradients"
    except _ERRORS as error:  # whatever PyTorch says is the answer
        return wrong + _words(error)
    return wrong or "right"


def _local_shape(tensor: Any, mesh: Any) -> tuple[int, ...]:
    shape = list(tensor.shape)
    (placement,) = tensor.placements
    if isinstance(placement, Shard):
        shape[placement.dim] //= mesh.size()
    return tuple(shape)


def _equal(ours: Any, theirs: Any) -> bool:
    return bool((ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max())


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def dtensor_step(size: int, runnable: bool, batch_norm: bool, mesh: Any) -> Callable[[], float]:
    """Return a step of training by DTensor, which returns the loss."""
    torch.manual_seed(1)
    module = distribute_module(stack(runnable, batch_norm), mesh)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    x = distribute_tensor(torch.rand(1, CHANNELS, size, size), mesh, [Shard(3)])
    y = distribute_tensor(torch.ones(1, 1, size // 64, size // 64), mesh, [Shard(3)])

    def step() -> float:
        optimizer.zero_grad()
        # That of logits where the target is 1: DTensor has no rule for binary_cross_entropy_with_logits.
        loss = (y * functional.softplus(-module(x))).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach().full_tensor())

    return step


def keras_step(size: int, runnable: bool, batch_norm: bool) -> Callable[[], float]:
    """Return a step of training by keras_hpc, which returns the loss."""
    import keras_hpc

    model = keras_stack(size, runnable, batch_norm)
    rows = slice(*keras_hpc.part(size))
    x = np.random.default_rng(1).random((1, size, size, CHANNELS), "float32")[:, rows].copy()
    y = np.ones((1, size // 64, size // 64, 1), "float32")
    return lambda: float(model.train_on_batch(x, y))


def timed(step: Callable[[], float], steps: int) -> list[float]:
    """Return the seconds of each of so many steps, of the slowest rank. Collective."""
    for _ in range(_WARM_UP):
        step()
    seconds = []
    for _ in range(steps):
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        step()
        seconds.append(MPI.COMM_WORLD.allreduce(time.perf_counter() - begin, op=MPI.MAX))
    return seconds


def compare(size: int, runnable: bool, batch_norm: bool, steps: int, rounds: int) -> dict[str, Any]:
    """Train a network by both in turns. Collective.

    Returns:
        Milliseconds of a step, or what PyTorch says, and how much faster keras_hpc is.
    """
    import keras_hpc

    refused: dict[str, str] = {}

    def run(ours: bool) -> list[float]:
        if not ours:
            if refused:
                return []
            try:
                with ranks_of_gloo() as mesh, mended():
                    return timed(dtensor_step(size, runnable, batch_norm, mesh), steps)
            except _ERRORS as error:  # whatever PyTorch says is the answer
                refused["dtensor"] = _words(error)
                return []
        keras_hpc.init(spatial=(MPI.COMM_WORLD.size, 1))
        try:
            return timed(keras_step(size, runnable, batch_norm), steps)
        finally:
            keras_hpc.finalize()

    found = turns.in_turns(run, rounds)
    ours, theirs = ([second for seconds in found[way] for second in seconds] for way in (True, False))
    row: dict[str, Any] = {
        "network": "strides 2 x 2" if runnable else "benchmarks/parts.py",
        "batch_norm": batch_norm,
        "size": size,
        "keras_hpc_ms": round(1e3 * statistics.median(ours), 1),
        "keras_hpc_least_ms": round(1e3 * min(ours), 1),
    }
    if refused:
        return row | refused
    ratio = statistics.median(theirs) / statistics.median(ours)
    return row | {
        "dtensor_ms": round(1e3 * statistics.median(theirs), 1),
        "dtensor_least_ms": round(1e3 * min(theirs), 1),
        "times_as_fast": round(ratio, 2),
    }


@contextlib.contextmanager
def ranks_of_gloo() -> Iterator[Any]:
    """Make the ranks a group of gloo for a while, and give their mesh: keras_hpc refuses to work beside one."""
    world, address = MPI.COMM_WORLD, ""
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"tcp://localhost:{free.getsockname()[1]}"
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    torch.distributed.init_process_group(
        "gloo", init_method=world.bcast(address), rank=world.rank, world_size=world.size, timeout=timeout
    )
    try:
        yield init_device_mesh("cpu", (world.size,))
        world.Barrier()
    finally:
        torch.distributed.destroy_process_group()


def say_what_it_can(mesh: Any) -> None:
    """Print a line for each layer. Collective."""
    for how, mends in (("as it is", contextlib.nullcontext()), ("mended", mended())):
        with mends:
            for dimension in (2, 3):
                for name, layer in layers_to_try().items():
                    said = verdict(layer, mesh, dimension)
                    if MPI.COMM_WORLD.rank == 0:
                        sys.stdout.write(f"{how}, Shard({dimension}), {name}: {said}\n")


def main() -> None:
    """Try layers, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512, help="of the images, a multiple of 128 (default: 512)")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="timed, of a turn (default: 6)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="turns of each; 0: layers only (default: 2)")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with ranks_of_gloo() as mesh:
        say_what_it_can(mesh)
    for runnable in (False, True) if arguments.rounds else ():
        for batch_norm in (False, True):
            turns.write(compare(arguments.size, runnable, batch_norm, arguments.steps, arguments.rounds))
    sys.stdout.flush()
    MPI.COMM_WORLD.Barrier()
    os._exit(0)  # gloo's destructor now and then waits for itself, for good (PyTorch 2.13)


if __name__ == "__main__":
    main()
