# SPDX-License-Identifier: Apache-2.0
"""Makes replicas equal: variables start from the root's, random seeds differ by rank, per-rank state is averaged."""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.errors import PlanMismatchError
from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private

_CHUNK_BYTES = 64 << 20

# Models that were made equal, with the number of their variables then, and those whose per-rank state has moved since.
# Both keep the order of insertion, which is the same on every rank; a WeakSet would not.
_equal: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_moved: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def install(job: Any, patcher: Any) -> None:
    """Gives each rank a stream of random numbers of its own, and notices weights that are loaded."""
    seeds = keras_private.module("keras.src.random.seed_generator")
    stored = keras_private.get("keras.src.backend.common.global_state:get_global_attribute")
    generator = stored(keras_private.GLOBAL_SEED_GENERATOR)
    if generator is not None:
        fold_seed(generator, job.rank)

    def own_stream(original: Any) -> Any:
        @functools.wraps(original)
        def global_seed_generator() -> Any:
            exists = stored(keras_private.GLOBAL_SEED_GENERATOR) is not None
            generator = original()
            if not exists:
                fold_seed(generator, job.rank)
            return generator

        return global_seed_generator

    def notice_weights(original: Any) -> Any:
        @functools.wraps(original)
        def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
            original(self, *args, **kwargs)
            loaded = set(map(id, self.variables))
            for model in [model for model in _equal if not loaded.isdisjoint(map(id, model.variables))]:
                del _equal[model]

        return load_weights

    patcher.patch(seeds, "global_seed_generator", own_stream)
    patcher.patch(keras.Model, "load_weights", notice_weights)


def forget() -> None:
    """Forgets every model."""
    _equal.clear()
    _moved.clear()


def is_equal(model: Any) -> bool:
    """Returns whether the model was made equal with all the variables that it has now, or the optimizer at all."""
    if isinstance(model, keras.optimizers.Optimizer):
        return model in _equal
    return _equal.get(model) == len(replicated_variables(model))


def was_made_equal(model: Any) -> bool:
    """Returns whether the model was made equal since it was compiled or loaded weights."""
    return model in _equal


def mark_moved(model: Any) -> None:
    """Remembers that each rank trained the model on its own data."""
    _moved[model] = True


def replicated_variables(model: Any) -> list[keras.Variable]:
    """Returns the state of a model and its optimizers that is alike on all ranks.

    That is without metrics, random seeds, and gradients that wait for more micro-batches.
    """
    skip = {id(generator.state) for generator in seed_generators(model)} | set(map(id, model.metrics_variables))
    skip |= set(map(id, accumulators(model)))
    variables = [
        *model.variables,
        *(variable for optimizer in optimizers_of(model) for variable in optimizer.variables),
    ]
    return [variable for variable in _unique(variables) if id(variable) not in skip]


def synchronize(model: Any) -> None:
    """Gives all ranks the root's variables and random streams of their own. Collective on the model's team.

    Args:
        model: a model that is built; what is not built yet is left out.

    Raises:
        PlanMismatchError: the ranks built different models.
    """
    team = current.team_of(model)
    seeds = [generator.state for generator in seed_generators(model)]
    broadcast_variables(team, [*replicated_variables(model), *accumulators(model), *seeds])
    fold_seeds(seed_generators(model), team.rank)
    _equal[model] = len(replicated_variables(model))
    _moved.pop(model, None)


def synchronize_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Gives all ranks the root's values of an optimizer and of what it trains, in a user's own loop. Collective."""
    broadcast_variables(current.team_of(optimizer), _unique([*variables, *optimizer.variables]))
    _equal[optimizer] = len(variables)


def fold_seeds(generators: Iterable[Any], rank: int) -> None:
    """Turns what layers draw from, seed generators and PyTorch's own stream, into that of `rank`."""
    for generator in generators:
        fold_seed(generator, rank)
    if keras.backend.backend() == "torch":
        _fold_torch(rank)


def fold_seed(generator: Any, rank: int) -> None:
    """Turns a seed generator's state into that of `rank`; rank 0 keeps the state it has."""
    if rank == 0:
        return
    state = backends.current().to_numpy(generator.state.value)
    seed = np.random.SeedSequence([*(int(word) & 0xFFFFFFFF for word in state.ravel()), rank]).generate_state(1)[0]
    folded = state.copy()
    folded[0] = int(seed) & 0x3FFFFFFF  # fits every dtype that Keras keeps seeds in
    generator.state.assign(folded)


def _fold_torch(rank: int) -> None:
    """PyTorch's own stream, from which Keras draws where a layer has no seed."""
    import torch

    if rank > 0:
        seed = np.random.SeedSequence([int(torch.randint(2**31, ())), rank]).generate_state(1)[0]
        torch.manual_seed(int(seed))


def broadcast_variables(team: Any, variables: Sequence[Any], root: int = 0) -> None:
    """Assigns the root's values to the variables of all ranks, in few large messages. Collective.

    Args:
        team: the team that takes part.
        variables: the same shapes and dtypes in the same order on every rank.
        root: the rank in the team whose values count.

    Raises:
        PlanMismatchError: shapes, dtypes or the number of variables differ.
    """
    check_same(team, variables)
    backend = backends.current()
    for chunk in _chunks(variables):
        arrays = [backend.to_numpy(_value(variable)) for variable in chunk]
        buffer = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
        team.broadcast(buffer, root)
        if team.rank == root:
            continue
        start = 0
        for variable, array in zip(chunk, arrays, strict=True):
            received = buffer[start : start + array.nbytes].copy().view(array.dtype).reshape(array.shape)
            start += array.nbytes
            backend.assign(variable, received)


def average_moved(model: Any) -> None:
    """Averages the per-rank state of a model if it was trained since the last time. Collective on the model's team.

    So it does with gradients that wait for more micro-batches: their mean over ranks is what one rank would hold.
    """
    if not _moved:
        return
    own = set(map(id, per_rank_state(model)))
    related = [m for m in _moved if m is model or not own.isdisjoint(map(id, per_rank_state(m)))]
    if not related:
        return
    for moved in related:
        del _moved[moved]
    average(current.team_of(model), _unique(v for m in related for v in (*per_rank_state(m), *accumulators(m))))


def average_after_step(model: Any) -> None:
    """Averages what a step of `train_on_batch` moved, but not gradients that wait for more. Collective.

    Moving averages are linear: averaging now gives what averaging before evaluate or save would give. But this way
    `if rank() == 0: model.save(...)` needs no other rank.
    """
    variables = per_rank_state(model)
    if variables:
        average(current.team_of(model), variables)
    if not accumulators(model):
        _moved.pop(model, None)


def average(team: Any, variables: Sequence[keras.Variable]) -> None:
    """Averages variables over the ranks of a team. Collective.

    Sums are in float64, so that values that are equal already keep every bit. A variable whose `aggregation` is
    `"only_first_replica"`, and one that holds integers, takes the first rank's value.
    """
    backend = backends.current()
    integers = [v for v in variables if not keras.backend.is_float_dtype(v.dtype)]
    floats = [v for v in variables if keras.backend.is_float_dtype(v.dtype)]
    if integers:
        broadcast_variables(team, integers)
    if not floats:
        return
    arrays = [backend.to_numpy(variable.value) for variable in floats]
    first = np.repeat([v.aggregation == "only_first_replica" for v in floats], [array.size for array in arrays])
    buffer = np.concatenate([array.reshape(-1).astype(np.float64) for array in arrays])
    if team.rank > 0:
        buffer[first] = 0
    team.allreduce(buffer, op="sum")
    buffer[~first] /= team.size
    start = 0
    for variable, array in zip(floats, arrays, strict=True):
        backend.assign(variable, buffer[start : start + array.size].reshape(array.shape).astype(array.dtype))
        start += array.size


def per_rank_state(model: Any) -> list[keras.Variable]:
    """Returns what steps update from their own data, as BatchNormalization's statistics; no frozen weights or seeds."""
    return _unique(variable for layer in model._flatten_layers() for variable in layer._non_trainable_variables)


def check_equal(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raises if variables differ between ranks before an optimizer's first update. Collective on its team.

    For loops of the user's own where it is too late to make them equal: on JAX their state is an argument of the traced
    function, and on PyTorch gradients were computed with them.
    """
    team = current.team_of(optimizer)
    # `value` would be that of the trace; during `fit` there is none, and `fit` made replicas equal.
    variables = [variable for variable in variables if variable._value is not None]
    # Gradients that wait for more micro-batches are each rank's own; a checkpoint may have brought them.
    waiting = {id(v) for one in (optimizer, *held_optimizers(optimizer)) for v in _waiting(one)}
    variables = [variable for variable in variables if id(variable) not in waiting]
    check_same(team, variables)
    backend = backends.current()
    mine = [backend.to_numpy(variable._value) for variable in variables]
    digests = team.allgather_object([hashlib.sha256(array.tobytes()).hexdigest() for array in mine])
    for rank, theirs in enumerate(digests):
        different = [v.path for v, a, b in zip(variables, digests[0], theirs, strict=True) if a != b]
        if different:
            raise ValueError(
                "In a training loop of your own, replicas must start from equal weights: call "
                "keras_hpc.broadcast(model) before it, or keras.utils.set_random_seed(seed) with the same seed on "
                "every rank before the model is made, or load the same weights on every rank. "
                f"Received: `{different[0]}` differs between rank 0 and rank {rank} of the team"
            )
    _equal[optimizer] = len(variables)


def check_same(team: Any, variables: Sequence[Any]) -> None:
    """Raises on all ranks, naming the first variable that differs. Paths may differ: a loaded model has others."""
    mine = [f"{keras.backend.standardize_dtype(v.dtype)}{list(v.shape)}" for v in variables]
    digests = team.allgather_object(hashlib.sha256(" ".join(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    paths = [str(getattr(variable, "path", variable.name)) for variable in variables]
    lists = team.allgather_object([f"`{path}` of {text}" for path, text in zip(paths, mine, strict=True)])
    for index, here in enumerate(itertools.zip_longest(*lists, fillvalue="no variable of ")):
        odd = [rank for rank, text in enumerate(here) if text.split(" of ")[-1] != here[0].split(" of ")[-1]]
        if odd:
            raise PlanMismatchError(
                "The models of the ranks differ. Every rank must build the same layers in order. Received: as "
                f"variable {index}, {here[0]} on rank 0 of the team and {here[odd[0]]} on {', '.join(map(str, odd))}"
            )


def _value(variable: Any) -> Any:
    """Returns the value of a Keras variable, or of one of the backend that a loop of the user's own trains."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _chunks(variables: Sequence[keras.Variable]) -> Iterator[list[keras.Variable]]:
    chunk: list[keras.Variable] = []
    nbytes = 0
    for variable in variables:
        size = int(np.prod(variable.shape)) * 8
        if chunk and nbytes + size > _CHUNK_BYTES:
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(variable)
        nbytes += size
    if chunk:
        yield chunk


def optimizers_of(model: Any) -> list[Any]:
    """Returns the optimizers among a model's attributes, and those that they hold."""
    found = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    for optimizer in found:
        found.extend(held_optimizers(optimizer))
    return found


def held_optimizers(optimizer: Any) -> Sequence[Any]:
    """Returns the optimizers inside a loss scale or a `MultiOptimizer`."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [inner] if inner is not None else getattr(optimizer, "optimizers", None) or []


def accumulators(model: Any) -> list[keras.Variable]:
    """Returns the gradients that wait for more micro-batches, each rank's own."""
    return [variable for optimizer in optimizers_of(model) for variable in _waiting(optimizer)]


def _waiting(optimizer: Any) -> list[keras.Variable]:
    return [variable for variable in getattr(optimizer, "_accumulated_gradients", ()) if variable is not None]


def seed_generators(model: Any) -> list[Any]:
    """Returns the random generators of a model's layers, which differ by rank."""
    generators = _unique(generator for layer in model._flatten_layers() for generator in layer._seed_generators)
    # A layer made for tf.data pipelines keeps its seed in TensorFlow, whatever the backend.
    return [generator for generator in generators if isinstance(generator.state, keras.Variable)]


def _unique(items: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())
