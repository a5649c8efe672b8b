# SPDX-License-Identifier: Apache-2.0
"""Training steps of Keras on a GPU: `python -m benchmarks.gpu.fit MODE`, with one rank or, as a job, two that share it.

plain: Keras alone, without keras_hpc. init: the same behind `keras_hpc.init()`, one rank.
light: rank 0 trains, and rank 1 takes part: its gradients are constants, so that the GPU is rank 0's but for copies.

Prints milliseconds of a step. Of `light` it also times steps inside of `local()`: what is more outside is the
communication that nothing hides (S2), and its share of what copies and the reduction take one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from benchmarks.gpu import say

_EPOCHS = 4


class Batches(keras.utils.PyDataset):
    """The same batch again and again."""

    def __init__(self, x: np.ndarray, y: np.ndarray, steps: int) -> None:
        super().__init__()
        self._batch, self._steps = (x, y), steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._batch


class TakesPart(keras.Model):
    """A network, or what has its variables and gradients of the same shapes but computes nothing."""

    def __init__(self, network: Any, computes: bool) -> None:
        super().__init__()
        self.network = network
        self._computes = computes

    def call(self, x: Any) -> Any:
        """Return the network's output, or else a constant."""
        if self._computes:
            return self.network(x)
        nothing = 0 * sum(ops.sum(variable) for variable in self.network.trainable_variables)
        outputs = self.network.output_shape[-1]
        return ops.full((ops.shape(x)[0], outputs), 1 / outputs) + nothing


def network(name: str, batch: int, computes: bool = True) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return a compiled model and a batch for it."""
    random = np.random.default_rng(0)
    shape = {"resnet50": (224, 224, 3), "mlp": (1024,), "tiny": (8,)}[name]
    x = random.standard_normal((batch, *shape), np.float32)
    if name == "resnet50":
        model = keras.applications.ResNet50(weights=None, classes=1000)
        y = random.integers(0, 1000, batch)
        loss = "sparse_categorical_crossentropy"
    else:
        width, depth = {"mlp": (2048, 6), "tiny": (8, 2)}[name]
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
        model = keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(1)])
        y, loss = random.standard_normal((batch, 1), np.float32), "mse"
    model = TakesPart(model, computes)
    model.compile(keras.optimizers.SGD(1e-4), loss)
    return model, x, y


def step_ms(model: Any, x: np.ndarray, y: np.ndarray, steps: int) -> float:
    """Milliseconds of a training step: of the fastest epoch but the first, which compiles."""
    marks = [time.perf_counter()]
    mark = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: marks.append(time.perf_counter()))
    model.fit(Batches(x, y, steps), epochs=_EPOCHS, verbose=0, callbacks=[mark])
    return 1e3 * float(np.diff(marks)[1:].min()) / steps


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["plain", "init", "light"])
    parser.add_argument("--model", choices=["resnet50", "mlp", "tiny"], default="mlp")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, help="communication threads of a rank; else as init() does")
    parser.add_argument("--kept", type=Path, required=True, help="a file that keeps the times of earlier modes")
    arguments = parser.parse_args()
    kept = json.loads(arguments.kept.read_text()) if arguments.kept.is_file() else {}
    about = f"{keras.config.backend()}, {arguments.model}"
    if arguments.threads:
        about += f", {arguments.threads} threads"
    rank = 0
    if arguments.mode != "plain":
        import keras_hpc

        keras_hpc.init(shard=False, threads_per_team=arguments.threads or "auto")
        rank = keras_hpc.rank()
    model, x, y = _network(arguments, rank)
    measured = step_ms(model, x, y, arguments.steps)
    kept[f"{about}, {arguments.mode}"] = measured
    if rank == 0:
        say("fit", f"{about}: a step, {arguments.mode}", measured, "ms")
        arguments.kept.write_text(json.dumps(kept))
    plain = kept.get(f"{about}, plain")
    if arguments.mode == "init" and plain:
        _overhead(f"{about}: init() alone", measured, plain, 1)
    if arguments.mode == "light":
        _exposed(about, arguments, model, measured, plain)


def _network(arguments: argparse.Namespace, rank: int) -> tuple[Any, np.ndarray, np.ndarray]:
    only_takes_part = arguments.mode == "light" and rank > 0
    return network(arguments.model, 1 if only_takes_part else arguments.batch, not only_takes_part)


def _overhead(what: str, measured: float, plain: float, most: float) -> None:
    more = 100 * (measured / plain - 1)
    say("fit", f"{what}, more than without", more, "%", f"< {most}", holds=more < most)


def _exposed(about: str, arguments: Any, model: Any, measured: float, plain: float | None) -> None:
    """S2: what of the communication a step shows. Collective."""
    import keras_hpc
    from keras_hpc import _native
    from keras_hpc.job import current
    from keras_hpc.job.plan import TensorSpec

    team = current.job().teams[0]
    alone, x, y = _network(arguments, team.rank)
    team.barrier()
    with keras_hpc.local():
        without = step_ms(alone, x, y, arguments.steps)
    gradients = [TensorSpec("all", (sum(int(np.prod(v.shape)) for v in model.trainable_variables),), "float32")]
    on_host = team.plan("gradients on the host", gradients, in_segment=True, device=-1)
    array, reduce_ms = on_host.array(0), 0.0
    for _ in range(3):  # the first one touches the memory
        array[:] = 0
        team.barrier()
        begin = time.perf_counter()
        on_host.start(0, array)
        on_host.wait_all()
        reduce_ms = 1e3 * (time.perf_counter() - begin)
    copies_ms = 0.0
    with contextlib.suppress(_native.Error):
        to_host, back = _native.device_speeds(0, 4 << 20)
        copies_ms = 1e3 * array.nbytes * (1 / to_host + 1 / back)
    if team.rank > 0:
        return
    shown = measured - without
    part = shown / (copies_ms + reduce_ms)
    holds = part <= 0.25 and shown <= 2
    say("S2", f"{about}, light: a step, more than in local()", shown, "ms", "<= 2", holds=shown <= 2)
    text = f"{about}, light: of copies and reduction one after the other"
    say("S2", text, 100 * part, "%", "<= 25", holds=holds)
    if plain:
        _overhead(f"{about}: a rank that reduces beside one that takes part", measured, plain, 3)


if __name__ == "__main__":
    main()
