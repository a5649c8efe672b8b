# SPDX-License-Identifier: Apache-2.0
"""Random numbers: what a script draws on its own is the same on all ranks, what layers draw in steps differs by rank.

`init()` gives all ranks the root's states of the generators that scripts draw from: so splits, shuffles and initial
weights are those of one process. In a step, or where a model with weights is called, the numbers that come from Keras'
seed generators are folded with the rank when they are drawn; the generators' states stay equal. Streams that cannot be
folded, PyTorch's and TensorFlow's own, are exchanged for the rank's own during a step.

Data that draw while they are read, as windows of a series or augmented images, would draw the same for each rank's own
samples. So what a rank reads alone has random numbers of its own, and the generators then go on as on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private, running
from keras_hpc.spatial import run

P = ParamSpec("P")
T = TypeVar("T")

_MASK = 0x3FFFFFFF  # fits every dtype that Keras keeps seeds in


class _Reading(threading.local):
    number: int = 0  # what seeds are folded with where this thread reads data


_reading = _Reading()
_states = threading.RLock()  # held where states are exchanged for a reader's: TensorFlow reads in a thread of its own


def _make_lock() -> None:
    global _states
    _states = threading.RLock()


os.register_at_fork(after_in_child=_make_lock)  # another thread may hold the parent's


def install(job: Any, patcher: Any) -> None:
    """Fold what seed generators give."""

    def folded(original: Any) -> Any:
        @functools.wraps(original)
        def next_(self: Any, *args: Any, **kwargs: Any) -> Any:
            seed = original(self, *args, **kwargs)
            if _reading.number:
                return seed ^ _like(seed, _reading.number)
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
        # Without a seed TensorFlow gives each process, and each `Dataset.shuffle`, an order of its own. The seed comes
        # from Python's generator, which is not drawn from: a script draws what it draws on one rank. Operations with a
        # seed take the global one modulo 2^31 - 1, and that is what they take where none is set: samples that a data
        # set with a seed holds back for validation are the same whenever the script runs.
        state = hashlib.sha256(repr(random.getstate()).encode()).digest()
        number = int.from_bytes(state[:4], "little") >> 1
        tensorflow.random.set_seed(keras_private.TENSORFLOW_UNSET_SEED + number * (2**31 - 1))
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
def kept() -> Iterator[Callable[[], bool]]:
    """Afterwards the generators that scripts draw from are as they were before. Gives a function: is any other now?"""
    before = host_states()

    def have_moved() -> bool:
        return any(not np.array_equal(before.get(name, ()), state) for name, state in host_states().items())

    try:
        yield have_moved
    finally:
        for name, state in before.items():
            set_host_state(name, state)


@contextlib.contextmanager
def of_reader(*key: int) -> Iterator[None]:
    """Inside, generators give numbers of their own to what is read; afterwards they are as they were before.

    Args:
        key: numbers that no other reader has, or other samples.
    """
    torch = sys.modules.get("torch")
    with _states:
        python, numpy = random.getstate(), np.random.get_state()
        outside = None if torch is None else torch.get_rng_state()
        before = _reading.number
        try:
            _reading.number = begin_reading(*key) & _MASK
            yield
        finally:
            _reading.number = before
            random.setstate(python)
            np.random.set_state(numpy)
            if torch is not None:
                torch.set_rng_state(outside)


def begin_reading(*key: int) -> int:
    """Seed the generators for a reader. Return the seed."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    numpy: Any = np.random.get_state()
    if numpy[0] == "MT19937":
        np.random.seed(seed)
    if "torch" in sys.modules:
        begin_torch(*key)
    return seed


def begin_torch(*key: int) -> None:
    """Seed PyTorch's generator for a reader."""
    import torch

    torch.default_generator.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1)


@contextlib.contextmanager
def of_next_reader(rank: int) -> Iterator[None]:
    """The same where nobody counts what is read: the key is NumPy's state, which moves on if something is drawn."""

    def now() -> list[Any]:
        torch = sys.modules.get("torch")
        numpy: Any = np.random.get_state()
        return [random.getstate(), numpy[2], None if torch is None else torch.get_rng_state().tolist()]

    with _states:
        state: Any = np.random.get_state()
        _, words, position, *_ = state
        digest = hashlib.sha256(b"%d" % position + words.tobytes()).digest()
        with of_reader(int.from_bytes(digest[:8], "little"), rank):
            begun = now()
            yield
            drawn = begun != now()
        if drawn:
            np.random.random()


def _undisturbed(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with _states:
            return function(*args, **kwargs)

    return locked


@_undisturbed
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


@_undisturbed
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
