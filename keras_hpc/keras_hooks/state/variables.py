# SPDX-License-Identifier: Apache-2.0
"""Variables of models and optimizers: which there are, and how ranks share, average and compare them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import xxhash

from keras_hpc import backends
from keras_hpc.errors import PlanMismatchError
from keras_hpc.job import current

DIGEST_BYTES = 16
_CHUNK_BYTES = 64 << 20


def replicated_variables(model: Any) -> list[keras.Variable]:
    """Return the state of a model and its optimizers that is alike on all ranks.

    That is without metrics, random seeds, and gradients that wait for more micro-batches.
    """
    own = {id(slot) for optimizer in optimizers_of(model) for slot in sharded_slots(optimizer)}
    return [variable for variable in common_variables(model) if id(variable) not in own]


def common_variables(model: Any) -> list[keras.Variable]:
    """Return the same, and what optimizers that are sharded keep of it on this rank, in the order without sharding."""
    skip = {id(generator.state) for generator in seed_generators(model)} | set(map(id, model.metrics_variables))
    local = known_local()
    optimizers = optimizers_of(model)
    skip |= set(map(id, accumulators(model))) | local
    skip |= {id(slot) for optimizer in optimizers for slot in local_slots(optimizer, local)}
    variables = [
        *model.variables,
        *(variable for optimizer in optimizers for variable in optimizer.variables),
    ]
    return [variable for variable in unique(variables) if id(variable) not in skip]


def per_rank_state(model: Any) -> list[keras.Variable]:
    """Return what steps update from their own data, as BatchNormalization's statistics.

    That is without frozen or quantized weights, and without seeds.
    """
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "quantization_mode", None) is None]
    local = known_local()
    return unique(v for layer in layers for v in layer._non_trainable_variables if id(v) not in local)


def buffers(*models: Any) -> list[Any]:
    """Return what modules of PyTorch inside models keep beside their weights; none on other backends."""
    if keras.backend.backend() != "torch":
        return []
    from keras_hpc.backends import torch_buffers

    found: list[Any] = torch_buffers.of(models)
    return found


def common_buffers(model: Any) -> list[Any]:
    """Return those of a model's `buffers` that are the same on all ranks: not of layers that `keep_local` was given."""
    local = {id(buffer.value) for buffer in buffers(*current.job().known.local_layers())}
    return [buffer for buffer in buffers(model) if id(buffer.value) not in local]


def known_local() -> set[int]:
    """Return the ids of the variables that `keep_local` keeps different on each rank."""
    return {id(variable) for layer in current.job().known.local_layers() for variable in layer.variables}


def trained_by(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer updates, once it is built."""
    # Before Keras 3.12 a LossScaleOptimizer leaves them to the one that it holds.
    held: list[Any] = [variable for inner in held_optimizers(optimizer) for variable in trained_by(inner)]
    return optimizer._trainable_variables or held


def local_slots(optimizer: Any, local: set[int]) -> list[Any]:
    """Return what an optimizer keeps for variables that are local: their momenta and the like."""
    trained = optimizer._trainable_variables if local else []
    lists = [value for value in vars(optimizer).values() if isinstance(value, list) and len(value) == len(trained)]
    positions = [index for index, variable in enumerate(trained) if id(variable) in local]
    slots = [values[index] for values in lists if values is not trained for index in positions]
    return [slot for slot in slots if isinstance(slot, keras.Variable) and id(slot) not in local]


def sharded_slots(optimizer: Any) -> list[Any]:
    """Return what an optimizer, and those that it holds, keep of variables on this rank and not on others."""
    shards = current.job().known.optimizer(optimizer).shards
    held = [slot for inner in held_optimizers(optimizer) for slot in sharded_slots(inner)]
    if shards is None or not optimizer.built:
        return held
    shards.complete(optimizer)
    return [slot for slot, _ in shards.slots]


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers among the attributes of a model and of its layers, and those that they hold."""
    found: list[Any] = []
    for layer in unique([model, *model._flatten_layers()]):
        for value in vars(layer).values():
            found.extend(_optimizers_in(value))
    for optimizer in found:
        found.extend(held_optimizers(optimizer))
    return unique(found)


def _optimizers_in(value: Any) -> list[Any]:
    if isinstance(value, keras.optimizers.Optimizer):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, keras.optimizers.Optimizer)]
    return []


def held_optimizers(optimizer: Any) -> Sequence[Any]:
    """Return the optimizers inside a loss scale or a `MultiOptimizer`."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [inner] if inner is not None else getattr(optimizer, "optimizers", None) or []


def with_held(optimizer: Any) -> list[Any]:
    """Return the optimizer and those that it holds."""
    return [optimizer, *(inner for held in held_optimizers(optimizer) for inner in with_held(held))]


def slots_of(optimizer: Any) -> list[Any]:
    """Return what an optimizer of Keras keeps for each of its weights: momenta, averages; not what waits."""
    found: list[Any] = []
    for one in with_held(optimizer) if isinstance(optimizer, keras.optimizers.Optimizer) else ():
        trained = one._trainable_variables
        not_slots = {
            id(one._iterations),
            id(one._learning_rate),
            *map(id, trained),
            *map(id, waiting(one)),
        }
        for name, values in vars(one).items():
            if isinstance(values, list) and len(values) == len(trained) and name != "_variables":
                found.extend(v for v in values if isinstance(v, keras.Variable) and id(v) not in not_slots)
    return [slot for slot in unique(found) if keras.backend.is_float_dtype(slot.dtype)]


def known_apart() -> set[int]:
    """Return the ids of the variables of which each rank has values of its own, in the middle of local steps."""
    lines = [known.local for _, known in current.job().known.optimizers() if known.local is not None]
    return {id(variable) for line in lines if line.is_apart for variable in (*line.weights, *line.slots)}


def accumulators(model: Any) -> list[keras.Variable]:
    """Return the gradients that wait for more micro-batches, each rank's own."""
    return [variable for optimizer in optimizers_of(model) for variable in waiting(optimizer)]


def waiting(optimizer: Any) -> list[keras.Variable]:
    """Return the gradients of an optimizer that wait for more micro-batches."""
    return [variable for variable in getattr(optimizer, "_accumulated_gradients", ()) if variable is not None]


def seed_generators(model: Any) -> list[Any]:
    """Return the random generators of a model's layers, which differ by rank."""
    generators = unique(generator for layer in model._flatten_layers() for generator in layer._seed_generators)
    # A layer made for tf.data pipelines keeps its seed in TensorFlow, whatever the backend.
    return [generator for generator in generators if isinstance(generator.state, keras.Variable)]


def broadcast_variables(team: Any, variables: Sequence[Any], root: int = 0) -> bool:
    """Assign the root's values to the variables of all ranks. Collective. Values that agree already are not sent.

    Args:
        team: the team that takes part.
        variables: the same shapes and dtypes in the same order on every rank.
        root: the rank in the team whose values count.

    Returns:
        Whether some values differed; the same on all ranks.

    Raises:
        PlanMismatchError: shapes, dtypes or the number of variables differ.
    """
    check_same(team, variables)
    differing = differing_variables(team, variables, root)
    backend = backends.current()
    for chunk in _chunks([variables[index] for index in differing]):
        arrays = [np.asarray(backend.view(variable), order="C") for variable in chunk]
        buffer = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
        team.broadcast(buffer, root)
        if team.rank == root:
            continue
        start = 0
        for variable, array in zip(chunk, arrays, strict=True):
            received = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            start += array.nbytes
            backend.assign(variable, received)
    return bool(differing)


def differing_variables(team: Any, variables: Sequence[Any], root: int = 0) -> list[int]:
    """Return the positions of the variables whose bits are not the root's on all ranks. Collective."""
    if not variables:
        return []
    everyone = team.allgather(digests(variables)[None])
    positions: list[int] = np.flatnonzero((everyone != everyone[root]).any(axis=(0, 2))).tolist()
    return positions


def digests(values: Sequence[Any]) -> np.ndarray:
    """Return a digest of each variable's or tensor's bits, (n, 16) bytes."""
    view = backends.current().view
    found = np.empty((len(values), DIGEST_BYTES), np.uint8)
    for index, value in enumerate(values):
        content = np.ascontiguousarray(view(value)).reshape(-1).view(np.uint8)
        # Nobody forges a weight to look like another; XXH3 reads as fast as memory delivers.
        found[index] = np.frombuffer(xxhash.xxh3_128_digest(content.data), np.uint8)
    return found


def average(team: Any, variables: Sequence[keras.Variable]) -> None:
    """Averages variables over the ranks of a team. Collective.

    Sums are in float64, so that values that are equal already keep every bit. A variable whose `aggregation` is
    `"only_first_replica"`, and one that holds integers, takes the first rank's value.
    """
    if (virtual := current.job().virtual) is not None:
        virtual.states.average(team, variables)
        return
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
        mean = buffer[start : start + array.size].reshape(array.shape).astype(array.dtype)
        start += array.size
        if mean.tobytes() != array.tobytes():  # as those of layers that all ranks compute alike, after each step
            backend.assign(variable, mean)


def check_same(team: Any, variables: Sequence[Any]) -> None:
    """Raise on all ranks, naming the first variable that differs. Paths may differ: a loaded model has others."""
    mine = [f"{keras.backend.standardize_dtype(v.dtype)}{list(v.shape)}" for v in variables]
    digests = team.allgather_object(hashlib.sha256(" ".join(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    paths = [str(getattr(variable, "path", variable.name)) for variable in variables]
    lists = team.allgather_object([f"`{path}` of {text}" for path, text in zip(paths, mine, strict=True)])
    for index, here in enumerate(itertools.zip_longest(*lists, fillvalue="no variable")):
        odd = [rank for rank, text in enumerate(here) if text.split(" of ")[-1] != here[0].split(" of ")[-1]]
        if odd:
            raise PlanMismatchError(
                "The models of the ranks differ, or their optimizers. Every rank must build the same layers in order, "
                "train the same of them, and compile the same optimizer. Received: as variable "
                f"{index}, {here[0]} on rank 0 of the team and {here[odd[0]]} on {', '.join(map(str, odd))}"
            )


def standard_dtype(variable: Any) -> str:
    """Return the name of the dtype of a variable's, or a tensor's, values."""
    found = str(keras.backend.standardize_dtype(variable.dtype))
    if keras.backend.backend() == "jax":  # whose variables of 64 bits have values of 32, unless x64 is on
        import jax

        found = jax.dtypes.canonicalize_dtype(found).name
    return found


def value_of(variable: Any) -> Any:
    """Return the value of a Keras variable, or of one of the backend that a loop of the user's own trains."""
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


def unique(items: Iterable[Any]) -> list[Any]:
    """Return the items without those that are there twice, in order."""
    return list({id(item): item for item in items}.values())
