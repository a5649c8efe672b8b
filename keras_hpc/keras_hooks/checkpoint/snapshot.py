# SPDX-License-Identifier: Apache-2.0
"""All values that training depends on, of all ranks, as arrays; and back into another process.

What is alike on all ranks is taken from the first. Each rank's own (random states, running metrics, statistics of its
own data, gradients that wait) travels to it once, if it differs at all: so only the first rank reads and writes files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.plan import bytes_of, dtype_of
from keras_hpc.keras_hooks import delayed, seeds, variables

# Kinds of what a rank has of its own.
_RANDOM, _SEED, _METRIC, _STATE = "random", "seed", "metric", "state"
# This rank's streams of random numbers inside of steps, with the names under which they are saved.
_STREAMS = {"torch": "torch of steps", "torch outside": "torch when they began"}
_DIGEST_BYTES = 32


def nbytes(model: Any) -> int:
    """Return about how many bytes `take` returns for a model that is built."""
    own = sum(map(_size_of, (variable for _, variable in _own_variables(model))))
    return sum(map(_size_of, _common_variables(model))) + own * current.team_of(model).size + 8192


def take(model: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a description for JSON, and arrays, which are whole on the team's first rank. Collective.

    Args:
        model: of which no step is running.
    """
    team = current.team_of(model)
    late = delayed.outstanding(model)
    own = _own(model)
    digests = [
        np.frombuffer(hashlib.blake2b(bytes_of(a).data, digest_size=_DIGEST_BYTES).digest(), "u1") for *_, a in own
    ]
    everyone = team.allgather(np.stack(digests)[None])
    differing = np.flatnonzero((everyone != everyone[0]).any(axis=(0, 2))).tolist()
    arrays: dict[str, np.ndarray] = {}
    mine = _joined([own[index][2] for index in differing])
    for rank in range(team.size if differing else 0):
        buffer = mine.copy()
        if rank > 0:
            team.broadcast(buffer, rank)
        if team.rank == 0:
            arrays[f"rank{rank}"] = buffer
    common = _common_variables(model)
    if team.rank == 0:
        arrays["alike"] = _joined([array for index, (*_, array) in enumerate(own) if index not in differing])
        to_numpy = backends.current().to_numpy
        arrays |= {f"variable{i}": bytes_of(np.asarray(to_numpy(v), order="C")) for i, v in enumerate(common)}
        arrays |= {f"late{i}_{j}": bytes_of(a) for i, (*_, averages) in enumerate(late) for j, a in enumerate(averages)}
    return {
        "ranks": team.size,
        "backend": keras.backend.backend(),
        "variables": [_described(variable) for variable in common],
        "own": [[name, kind, array.dtype.name, list(array.shape)] for name, kind, array in own],
        "differing": differing,
        "late": [[number, place, [[a.dtype.name, list(a.shape)] for a in arrays]] for number, place, arrays in late],
    }, arrays


def check(model: Any, facts: dict[str, Any]) -> None:
    """Raise unless a model is like the one that `take` described.

    Raises:
        ValueError: naming the first difference.
    """
    if facts["backend"] != keras.backend.backend():
        raise ValueError(
            f"The checkpoint was made with another backend of Keras. Expected {facts['backend']!r}. Received: "
            f"{keras.backend.backend()!r}"
        )
    own = [[v.path, standard_dtype(v), list(v.shape)] for _, v in _own_variables(model)]
    theirs = [(f"`{path}` of", dtype, shape) for path, dtype, shape in facts["variables"]]
    theirs += [(f"`{name}` of", dtype, shape) for name, kind, dtype, shape in facts["own"] if kind != _RANDOM]
    mine = [(f"`{p}` of", d, s) for p, d, s in [*map(_described, _common_variables(model)), *own]]
    nothing: tuple[str, str, list[int]] = ("no variable", "", [])
    for index in range(max(len(mine), len(theirs))):
        a, b = (x[index] if index < len(x) else nothing for x in (theirs, mine))
        if a[1:] != b[1:]:
            raise ValueError(
                "The checkpoint is of another model, optimizer or metrics, or what it holds is not built yet. Expected "
                "the same model, compiled alike; where Keras cannot build it from data, build model and optimizer "
                "before `fit`. Another path begins anew. Received: "
                f"variable {index} is {_text(a)} in the checkpoint and {_text(b)} here"
            )


def put_back(model: Any, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Give model, optimizers and random generators of all ranks what `take` has taken. Collective.

    On another number of ranks all get what is alike, the mean of each rank's statistics and waiting gradients, no
    running metrics, and random states that are new for all but the first.

    Args:
        model: `check` found it to fit.
        facts: on every rank.
        arrays: on the team's first rank.
    """
    team, backend = current.team_of(model), backends.current()
    common = _common_variables(model)
    if team.rank == 0:
        for index, variable in enumerate(common):
            _, dtype, shape = facts["variables"][index]
            backend.assign(variable, arrays[f"variable{index}"].view(dtype_of(dtype)).reshape(shape))
    variables.broadcast_variables(team, common)
    specs = [(dtype, shape) for _, _, dtype, shape in facts["own"]]
    differing = set(facts["differing"])
    elsewhere = facts["ranks"] != team.size
    if elsewhere:
        values = _split(share(team, _merged(facts, arrays) if team.rank == 0 else None), specs)
    else:
        alike = _split(share(team, arrays.get("alike")), [s for i, s in enumerate(specs) if i not in differing])
        mine = np.empty(0, np.uint8)
        for rank in range(team.size if differing else 0):
            received = share(team, arrays.get(f"rank{rank}"))
            mine = received if rank == team.rank else mine
        own = _split(mine, [s for i, s in enumerate(specs) if i in differing])
        rest = {True: iter(own), False: iter(alike)}
        values = [next(rest[index in differing]) for index in range(len(specs))]
    own_variables = iter(_own_variables(model))
    for (name, kind, *_), value in zip(facts["own"], values, strict=True):
        if kind == _RANDOM:
            _set_random(name, value)
        else:
            backend.assign(next(own_variables)[1], value)
    if elsewhere:
        current.job().streams.clear()  # of each rank: new ones
    late = []
    for i, (number, place, described) in enumerate(facts["late"]):
        averages = [share(team, arrays.get(f"late{i}_{j}")) for j in range(len(described))]
        shaped = zip(averages, described, strict=True)
        late.append((number, place, [a.view(dtype_of(dtype)).reshape(shape) for a, (dtype, shape) in shaped]))
    delayed.restore(model, late)


def share(team: Any, array: np.ndarray | None) -> np.ndarray:
    """Return the bytes that the team's first rank has. Collective.

    Args:
        team: who shares.
        array: on the first rank, bytes; of others it is not read.
    """
    length = np.array([0 if array is None or team.rank > 0 else array.size], np.int64)
    team.broadcast(length)
    buffer = array if team.rank == 0 and array is not None else np.empty(int(length[0]), np.uint8)
    if length[0]:
        buffer = np.ascontiguousarray(buffer)
        team.broadcast(buffer)
    return buffer


def share_object(team: Any, value: Any) -> Any:
    """Return what the team's first rank passes, which JSON can hold. Collective."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy() if team.rank == 0 else None
    return json.loads(share(team, text).tobytes())


def standard_dtype(variable: Any) -> str:
    """Return the name of a variable's dtype."""
    return str(keras.backend.standardize_dtype(variable.dtype))


def _merged(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> np.ndarray:
    """What each of another number of ranks gets."""
    specs = [(dtype, shape) for _, _, dtype, shape in facts["own"]]
    differing = set(facts["differing"])
    alike = iter(_split(arrays["alike"], [s for i, s in enumerate(specs) if i not in differing]))
    kept = range(facts["ranks"] if differing else 0)
    ranks = [_split(arrays[f"rank{rank}"], [s for i, s in enumerate(specs) if i in differing]) for rank in kept]
    different = zip(*ranks, strict=True)
    values = []
    for index, (_, kind, dtype, _) in enumerate(facts["own"]):
        of_ranks = next(different) if index in differing else (next(alike),)
        value = of_ranks[0]
        if kind == _METRIC:
            value = np.zeros_like(value)
        elif kind == _STATE and len(of_ranks) > 1 and keras.backend.is_float_dtype(dtype):
            value = np.mean([a.astype(np.float64) for a in of_ranks], axis=0).astype(value.dtype)
        values.append(value)
    return _joined(values)


def _common_variables(model: Any) -> list[Any]:
    own = {id(variable) for _, variable in _own_variables(model)}
    return [variable for variable in variables.replicated_variables(model) if id(variable) not in own]


def _own_variables(model: Any) -> list[tuple[str, Any]]:
    """What a rank's own samples and random numbers change, with its kind."""
    found: dict[int, tuple[str, Any]] = {}
    for kind, kept in (
        (_SEED, [generator.state for generator in variables.seed_generators(model)]),
        (_METRIC, model.metrics_variables),
        (_STATE, variables.accumulators(model)),
        (_STATE, variables.per_rank_state(model)),
    ):
        for variable in kept:
            found.setdefault(id(variable), (kind, variable))
    return list(found.values())


def _own(model: Any) -> list[tuple[str, str, np.ndarray]]:
    """The same with the values, and the random states of libraries: name, kind, value."""
    to_numpy = backends.current().to_numpy
    found = [(v.path, kind, np.asarray(to_numpy(v), order="C")) for kind, v in _own_variables(model)]
    return [*found, *((name, _RANDOM, value) for name, value in _random_states().items())]


def _random_states() -> dict[str, np.ndarray]:
    """The states of all generators that data sets and layers without a seed of their own draw from."""
    states = seeds.host_states()
    if keras.backend.backend() == "torch":
        import torch

        for own in sorted(current.job().streams.keys() & _STREAMS.keys()):
            states[_STREAMS[own]] = current.job().streams[own].numpy().copy()
        if torch.cuda.is_available():
            states["torch.cuda"] = torch.cuda.get_rng_state().numpy()
    return states


def _set_random(name: str, value: np.ndarray) -> None:
    if name == "torch.cuda":
        import torch

        torch.cuda.set_rng_state(torch.from_numpy(value.copy()))
    elif name in _STREAMS.values():
        import torch

        (own,) = (key for key, saved in _STREAMS.items() if saved == name)
        current.job().streams[own] = torch.from_numpy(value.copy())
    else:
        seeds.set_host_state(name, value)


def _described(variable: Any) -> list[Any]:
    return [variable.path, standard_dtype(variable), list(variable.shape)]


def _text(described: tuple[str, str, list[int]]) -> str:
    name, dtype, shape = described
    return f"{name} {dtype}{shape}" if dtype else name


def _size_of(variable: Any) -> int:
    return int(np.prod(variable.shape)) * dtype_of(standard_dtype(variable)).itemsize


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.uint8), *map(bytes_of, (np.asarray(a, order="C") for a in arrays))])


def _split(joined: np.ndarray, specs: Sequence[tuple[str, list[int]]]) -> list[np.ndarray]:
    arrays = []
    for name, shape in specs:
        dtype = dtype_of(name)
        size = int(np.prod(shape)) * dtype.itemsize
        part, joined = joined[:size], joined[size:]
        arrays.append(part.copy().view(dtype).reshape(shape))
    return arrays
