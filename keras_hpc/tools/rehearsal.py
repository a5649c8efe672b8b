# SPDX-License-Identifier: Apache-2.0
"""How long a step of a model in parts takes without its exchanges of rows, measured.

As many ranks as each node of the planned job will have are a job on this node: they share its cores, caches and memory,
reduce their gradients and update their weights. Each computes a part of a sample of its own, by the very program that
it would run in a group (`tools.alone`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_hpc.errors import LaunchError
from keras_hpc.job import launch
from keras_hpc.tools import launchers

_SECONDS = 5.0  # of measured steps
_FEWEST, _MOST = 5, 50
_WARMING_UP = 2  # steps


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal has found of a step.

    Attributes:
        seconds: that it takes without exchanges of rows.
        messages: that are exchanged in a group, one after the other.
        halo_bytes: of them, that the rank receives which receives most.
        gradient_bytes: that are reduced.
    """

    seconds: float
    messages: int
    halo_bytes: int
    gradient_bytes: int


class RehearsalError(Exception):
    """The ranks of a rehearsal have not come to its end."""


def rehearse(model: str, parts: int, ranks: int, batch_size: int) -> Rehearsed | None:
    """Return what a step of a part takes; None: the model cannot be split into so many.

    Args:
        model: FILE.py:FUNCTION.
        parts: into how many each sample is split, along the first spatial axis.
        ranks: of this node.
        batch_size: samples of each group.

    Raises:
        LaunchError: ranks cannot be started.
        RehearsalError: they have failed, as where a part needs more memory than there is.
    """
    if started := launch.ranks_started():
        raise LaunchError(f"this would start ranks from each rank. {started}. Start it alone.")
    command, environment = [], {}
    if ranks > 1:
        mpiexec = launchers.find_mpiexec(launchers.find_library())
        command = launchers.mpiexec_command(mpiexec, ranks)
        environment = launchers.mpiexec_environment(ranks, placed=False, pinned=False)
    command += [sys.executable, "-m", __name__, model, str(parts), str(batch_size)]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.strip().splitlines()
    if done.returncode != 0 or not said:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise RehearsalError(f"{ranks} rank{'s' * (ranks > 1)} ended with status {done.returncode}: {last}")
    found = json.loads(said[-1])
    return found and Rehearsed(**found)


def file_of(text: str) -> tuple[str, str]:
    """Return the file and the function of what `--spatial` says, FILE.py:FUNCTION."""
    path, _, name = text.rpartition(":")
    if not path or not Path(path).is_file():
        sys.exit(f"--spatial names a function that returns a model. Expected FILE.py:FUNCTION. Received: {text!r}")
    return path, name


def model_of(text: str) -> Any:
    """Return the model that a function in a file makes, FILE.py:FUNCTION."""
    path, name = file_of(text)
    spec = importlib.util.spec_from_file_location("planned_model", path)
    if spec is None or spec.loader is None:
        sys.exit(f"--spatial names a function in a file of Python. Expected FILE.py:FUNCTION. Received: {text!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        sys.exit(f"There is no function `{name}` in {path}. Expected FILE.py:FUNCTION. Received: {text!r}")
    model: Any = function()
    from keras_hpc.spatial.plan import functional_of

    if not hasattr(functional_of(model), "_nodes_by_depth"):
        sys.exit(
            f"--spatial rehearses what {name}() in {path} returns. Expected a functional model, or a sequential one "
            f"that begins with keras.Input. Received: {getattr(model, 'name', model)} ({type(model).__name__})"
        )
    return model


def step_of(model: Any, batch_size: int) -> Callable[[], float]:
    """Return what trains a model once on made-up samples, of which this rank has its rows; it returns the loss.

    A model that is not compiled gets stochastic gradient descent and the mean of squares. Of losses that take classes,
    as sparse ones, targets are numbers of them.
    """
    import keras

    from keras_hpc.keras_hooks import parts
    from keras_hpc.spatial.plan import WHOLE, functional_of

    if not model.compiled:
        model.compile("sgd", "mean_squared_error")
    runner = parts.runner_of(model)
    function = functional_of(model)

    def made(tensors: Sequence[Any], splits: Sequence[Any]) -> list[Any]:
        return [_array(x, batch_size, split) for x, split in zip(tensors, splits, strict=True)]

    of_inputs, of_outputs = [WHOLE] * len(function.inputs), [WHOLE] * len(function.outputs)
    if runner is not None:
        of_inputs, of_outputs = [runner.plan.splits[id(x)] for x in function.inputs], runner.plan.outputs
    x = keras.tree.pack_sequence_as(function._inputs_struct, made(function.inputs, of_inputs))
    outputs = zip(_losses_of(model, function), made(function.outputs, of_outputs), strict=True)
    y = keras.tree.pack_sequence_as(function._outputs_struct, [_targets(loss, output) for loss, output in outputs])

    def step() -> float:
        loss = model.train_on_batch(x, y)
        return float(loss[0] if isinstance(loss, (list, tuple)) else loss)

    return step


def _array(tensor: Any, batch_size: int, split: Any) -> Any:
    import numpy as np

    from keras_hpc.job import current

    shape = [batch_size, *tensor.shape[1:]]
    if None in shape:
        sys.exit(f"A model is rehearsed on samples of known extents. Expected numbers. Received: {tensor.shape}")
    for axis in split:
        begin, end = current.job().group.part(shape[axis], axis - 1)
        shape[axis] = end - begin
    values = np.random.default_rng(0).random(shape, "float32")
    return values if "float" in tensor.dtype else values.astype(tensor.dtype)


def _losses_of(model: Any, function: Any) -> list[Any]:
    """Return what a model was compiled with as the loss of each output."""
    import keras

    paths = [path for path, _ in keras.tree.flatten_with_path(function._outputs_struct)]
    if isinstance(model.loss, dict):
        names = zip(function.output_names, paths, strict=True)
        return [model.loss.get(name, model.loss.get(path[-1] if path else None)) for name, path in names]
    if isinstance(model.loss, (list, tuple)):
        return list(model.loss)
    return [model.loss] * len(paths)


def _targets(loss: Any, output: Any) -> Any:
    """Return targets for a loss: like the output, or classes where it takes these."""
    import keras
    import numpy as np

    function = keras.losses.get(loss)
    classes = np.random.default_rng(0).integers(0, output.shape[-1], output.shape[:-1], "int32")
    takes_classes = (
        keras.losses.sparse_categorical_crossentropy,
        keras.losses.categorical_generalized_cross_entropy,
    )
    if getattr(function, "fn", function) in takes_classes:
        return classes
    for targets in (output, classes):  # a function may call one of these
        with contextlib.suppress(Exception):
            if function is not None:
                function(*map(keras.ops.convert_to_tensor, (targets, output)))
            return targets
    return output  # which the step refuses again, and says why


def part_of(rank: int, ranks: int, parts: int) -> int:
    """Return which part a rank of a node has: those of a node are neighbours, in the middle where not all are there."""
    return (max(0, (parts - ranks) // 2) + rank) % parts


def main() -> None:
    """Rehearse as one rank; the first one prints what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("parts", type=int)
    parser.add_argument("batch_size", type=int)
    arguments = parser.parse_args()

    import keras_hpc
    from keras_hpc.keras_hooks import parts
    from keras_hpc.spatial.geometry import Grid
    from keras_hpc.tools.alone import standing_in

    keras_hpc.init()
    if keras_hpc.node_count() > 1:
        sys.exit(f"Ranks rehearse on one node. Received: {keras_hpc.node_count()} nodes")
    part = part_of(keras_hpc.rank(), keras_hpc.size(), arguments.parts)
    found = None
    with standing_in(Grid((arguments.parts,)), part) if arguments.parts > 1 else contextlib.nullcontext():
        model = model_of(arguments.model)
        step = step_of(model, arguments.batch_size)
        runner = parts.runner_of(model)
        if runner is not None or arguments.parts == 1:
            whole = not parts.gives_parts(model)
            messages = (0, 0) if runner is None else runner.plan.messages(arguments.batch_size, whole)
            gradients = sum(4 * math.prod(v.shape) for v in model.trainable_variables)
            found = Rehearsed(_seconds_of(step), *messages, gradients)
    if keras_hpc.rank() == 0:
        print(json.dumps(found and dataclasses.asdict(found)), flush=True)


def _seconds_of(step: Callable[[], Any]) -> float:
    """Return the median of so many steps as take some seconds, on all ranks alike. Collective."""
    from keras_hpc.job import current

    def seconds() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    first = [seconds() for _ in range(_WARMING_UP)][-1]
    count = min(max(round(_SECONDS / first), _FEWEST), _MOST)
    count = current.job().teams[0].broadcast_object(count)
    return statistics.median(seconds() for _ in range(count))


if __name__ == "__main__":
    main()
