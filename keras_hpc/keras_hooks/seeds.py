# SPDX-License-Identifier: Apache-2.0
"""Random numbers: what a script draws on its own is the same on all ranks, what layers draw in steps differs by rank.

`init()` gives all ranks the root's states of the generators that scripts draw from: so splits, shuffles and initial
weights are those of one process. In a step, or where a model with weights is called, the numbers that come from Keras'
seed generators are folded with the rank when they are drawn; the generators' states stay equal. Streams that cannot be
folded, PyTorch's and TensorFlow's own, are exchanged for the rank's own during a step.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private, running
from keras_hpc.spatial import run

_MASK = 0x3FFFFFFF  # fits every dtype that Keras keeps seeds in


def install(job: Any, patcher: Any) -> None:
    """Fold what seed generators give."""

    def folded(original: Any) -> Any:
        @functools.wraps(original)
        def next_(self: Any, *args: Any, **kwargs: Any) -> Any:
            seed = original(self, *args, **kwargs)
            if not _draws_by_rank():
                return seed
            step = running.step()
            if step is not None and step.offset is not None:
                return seed ^ _like(seed, step.offset)
            rank = _rank(None if step is None else step.model)
            return seed if rank == 0 else seed ^ _like(seed, offset(rank))

        return next_

    patcher.patch(keras.random.SeedGenerator, "next", folded)


def share(team: Any) -> None:
    """Give all ranks the root's states of the generators that scripts draw from. Collective on all ranks."""
    tensorflow = sys.modules.get("tensorflow")
    if team.rank == 0 and tensorflow is not None and _tensorflow_seed(tensorflow) is None:
        # Without a seed TensorFlow gives each process, and each `Dataset.shuffle`, an order of its own.
        # The seed comes from Python's generator, which is not drawn from: a script draws what it draws on one rank.
        state = hashlib.sha256(repr(random.getstate()).encode()).digest()
        tensorflow.random.set_seed(int.from_bytes(state[:4], "little") >> 1)
    states = host_states()
    mine = {name: [array.dtype.name, list(array.shape)] for name, array in states.items()}
    theirs = team.allgather_object(mine, "keras_hpc.init()")[0]
    for name, (dtype, shape) in theirs.items():
        array = states[name] if team.rank == 0 else np.empty(shape, dtype)
        team.broadcast(array)
        if team.rank > 0:
            set_host_state(name, array)


def agree(team: Any, what: str) -> None:
    """Give all ranks the root's states again if they differ: ranks that read other data may have drawn more.

    Collective on all ranks.

    Args:
        team: of all ranks of the job; of other teams the ranks outside would not take part.
        what: the caller, for the message where another rank calls something else.
    """
    if team.size == 1 or team.size != current.job().size:
        return
    states = host_states()
    digest = hashlib.sha256(b"".join(array.tobytes() for array in states.values())).hexdigest()
    if len(set(team.allgather_object(digest, what))) > 1:
        share(team)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Afterwards the generators that scripts draw from are as they were before."""
    before = host_states()
    try:
        yield
    finally:
        for name, state in before.items():
            set_host_state(name, state)


def host_states() -> dict[str, np.ndarray]:
    """Return the states of all generators that scripts, data sets and layers without a seed draw from."""
    version, words, gauss = random.getstate()
    del version
    states = {"python": np.array([*words, gauss is not None, gauss or 0.0], np.float64)}  # holds 32-bit words exactly
    kind, keys, *rest = np.random.get_state()
    if kind == "MT19937":
        states["numpy"] = np.array([*keys, *rest], np.float64)
    seed = keras_private.stored(keras_private.GLOBAL_RANDOM_SEED)
    generator = keras_private.stored(keras_private.GLOBAL_SEED_GENERATOR)
    own = [0, 0] if generator is None else backends.current().to_numpy(generator.state).tolist()
    states["keras"] = np.array([generator is not None, *own, seed is not None, seed or 0], np.int64)
    tensorflow, torch = sys.modules.get("tensorflow"), sys.modules.get("torch")
    if tensorflow is not None and (seed := _tensorflow_seed(tensorflow)) is not None:
        states["tensorflow"] = np.array([seed], np.int64)
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy().copy()
    return states


def set_host_state(name: str, value: np.ndarray) -> None:
    """Put back one of what `host_states` returns."""
    tensorflow, torch = sys.modules.get("tensorflow"), sys.modules.get("torch")
    if name == "python":
        random.setstate((3, tuple(map(int, value[:625])), float(value[626]) if value[625] else None))
    elif name == "numpy":
        keys, (position, has_gauss, gauss) = value[:624].astype(np.uint32), value[624:]
        np.random.set_state(("MT19937", keys, int(position), int(has_gauss), float(gauss)))
    elif name == "keras":
        keras_private.store(keras_private.GLOBAL_RANDOM_SEED, int(value[4]) if value[3] else None)
        if value[0]:
            generator = keras_private.get(keras_private.GLOBAL_SEED_GENERATOR_OF)()
            generator.state.assign(value[1:3].astype(keras.backend.standardize_dtype(generator.state.dtype)))
        else:
            keras_private.store(keras_private.GLOBAL_SEED_GENERATOR, None)
    elif name == "tensorflow" and tensorflow is not None:
        if _tensorflow_seed(tensorflow) != int(value[0]):  # setting it begins the sequence of operation seeds anew
            tensorflow.random.set_seed(int(value[0]))
    elif name == "torch" and torch is not None:
        torch.set_rng_state(torch.from_numpy(value.copy()))


@contextlib.contextmanager
def of_rank(model: Any) -> Iterator[None]:
    """Inside, PyTorch's and TensorFlow's own streams are this rank's; outside they are those of all.

    Args:
        model: whose step runs; None in a loop of the user's own.
    """
    rank = _rank(model)
    if keras.backend.backend() == "torch":
        import torch

        streams = current.job().streams
        outside = torch.get_rng_state()
        step = running.step()
        own = "torch" if step is None or step.part is None else f"torch of part {step.part}"
        began = own.replace("torch", "torch outside")
        # Whoever seeds PyTorch anew begins the streams of the ranks anew, too.
        if own not in streams or not torch.equal(streams[began], outside):
            streams[own], streams[began] = _folded_torch(outside, rank), outside
        torch.set_rng_state(streams[own])
        try:
            yield
        finally:
            streams[own] = torch.get_rng_state()
            torch.set_rng_state(outside)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        holder, name = keras_private.tensorflow_seed_holder(tf)
        outside = getattr(holder, name)
        if outside is not None:
            setattr(holder, name, (outside ^ offset(rank)) & 0x7FFFFFFF)
        try:
            yield
        finally:
            setattr(holder, name, outside)
    else:
        yield


@contextlib.contextmanager
def of_part() -> Iterator[None]:
    """Inside, PyTorch's own stream is this rank's; outside it goes on as that of the other ranks of its group."""
    if keras.backend.backend() != "torch":
        yield
        return
    import torch

    number = int(torch.randint(2**31, ()))
    outside = torch.get_rng_state()
    torch.default_generator.manual_seed((number << 31) ^ offset((run.part() or 0) + 1))
    try:
        yield
    finally:
        torch.set_rng_state(outside)


def _folded_torch(state: Any, rank: int) -> Any:
    import torch

    generator = torch.Generator()
    generator.set_state(state)
    generator.manual_seed((int(torch.randint(2**31, (), generator=generator)) << 31) ^ offset(rank + 1))
    return generator.get_state()


def _tensorflow_seed(tensorflow: Any) -> int | None:
    seed: int | None = keras_private.tensorflow_seed(tensorflow)
    return seed


def _rank(model: Any) -> int:
    """Whose numbers this rank draws: those of its replica; where it has a part of a tensor, its own."""
    step = running.step()
    if step is not None and step.part is not None:
        return step.part
    team = current.job().teams[0] if model is None else current.team_of(model)
    part = run.part()
    return team.replica if part is None else team.replicas + team.replica * team.parts + part


def _draws_by_rank() -> bool:
    """Whether what is drawn now belongs to this rank's samples: in a step, or in the call of a model with weights."""
    if not current.active():
        return False
    if running.step() is not None:
        return True
    entry = keras_private.entry_layer()
    return entry is not None and bool(entry.trainable_variables)


@functools.cache
def offset(rank: int) -> int:
    """A number for each rank, 0 for the first."""
    return 0 if rank == 0 else int(np.random.SeedSequence([0x6B657261, rank]).generate_state(1)[0]) & _MASK


def _like(seed: Any, number: Any) -> Any:
    """A number as what `seed ^` takes beside a tensor of seeds."""
    if not isinstance(number, int):
        return keras.ops.cast(number, seed.dtype)
    dtype = keras.backend.standardize_dtype(seed.dtype)
    if type(seed).__module__.startswith("torch"):
        return seed.new_tensor(number)
    return np.array(number, dtype)
