# SPDX-License-Identifier: Apache-2.0
"""All values that training depends on, of all ranks, as arrays; and back into another process.

What is alike on all ranks is dealt to those that write. Each rank's own (random states, running metrics, statistics of
its own data, gradients that wait) is written by itself, if it differs at all. Where not all ranks write together, that
travels to those that write. To copy the values is all that a step waits for: into memory that is kept for the next
time, because new pages take longer than the copy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.plan import bytes_of, dtype_of
from keras_hpc.keras_hooks.checkpoint import likeness, random_states, shared_out, tensors
from keras_hpc.keras_hooks.checkpoint.memory import Memory
from keras_hpc.keras_hooks.checkpoint.places import Places
from keras_hpc.keras_hooks.checkpoint.shared_out import Slots
from keras_hpc.keras_hooks.schedules import delayed, local_states
from keras_hpc.keras_hooks.state import variables
from keras_hpc.keras_hooks.state.variables import standard_dtype

# Kinds of what a rank has of its own. Of virtual ranks, a row for each of all.
_RANDOM, _SEED, _METRIC, _STATE, _PARTS, _SENT = "random", "seed", "metric", "state", "parts", "sent"
_BUFFER = "buffer"  # comes last: checkpoints from before December 2026 have none
_DIGEST_BYTES = 32
_PIECE_BYTES = 64 << 20  # larger variables are cut by rows, so that ranks can share them
_NAME = re.compile(r"variable(\d+)(?:\[(\d+):\d+\])?(?: .*)?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What is saved.

    Args:
        models: built ones, of which no step is running, on teams of the same ranks.
        metrics: whether what their metrics have counted so far is saved.
    """

    models: Sequence[Any]
    metrics: bool = True

    @property
    def team(self) -> Any:
        """The team of the first model."""
        return current.team_of(self.models[0])


def nbytes(trained: Trained) -> int:
    """Return about how many bytes a checkpoint takes."""
    own = sum(map(_size_of, (variable for _, variable in _own_variables(trained))))
    virtual = current.job().virtual
    ranks: int = trained.team.size if virtual is None else virtual.count
    slots = shared_out.slots_of(trained.models)
    common = sum(_size_of(variable, slots) for variable in _common_variables(trained))
    return common + own * ranks + 8192


def take(trained: Trained, places: Places, memory: Memory) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a description for JSON, and the arrays that this rank has to write. Collective.

    Args:
        trained: what to save.
        places: which ranks write together.
        memory: for the larger arrays.
    """
    team = trained.team
    late = delayed.outstanding(trained.models)
    local, of_local, sent = local_states.take(trained.models)
    own = [*_own(trained), *((name, _SENT, array) for name, array in sent)]
    digests = [
        np.frombuffer(hashlib.blake2b(bytes_of(a).data, digest_size=_DIGEST_BYTES).digest(), "u1") for *_, a in own
    ]
    everyone = team.allgather(np.stack(digests)[None])
    differing = np.flatnonzero((everyone != everyone[0]).any(axis=(0, 2))).tolist()
    arrays: dict[str, np.ndarray] = {}
    mine = _joined([own[index][2] for index in differing])
    if places.together and differing:
        arrays[f"rank{team.rank}"] = mine
    for rank in range(team.size if differing and not places.together else 0):
        buffer = mine.copy()
        if rank > 0:
            team.broadcast(buffer, rank)
        if places.leads:
            arrays[f"rank{rank}"] = buffer
    common, slots = _common_variables(trained), shared_out.slots_of(trained.models)
    large = _large(trained, places)
    if places.leads:
        arrays["alike"] = _joined([array for index, (*_, array) in enumerate(own) if index not in differing])
        arrays |= of_local
        arrays |= {f"late{i}_{j}": bytes_of(a) for i, (*_, averages) in enumerate(late) for j, a in enumerate(averages)}
    arrays |= memory.copies(large)
    virtual = current.job().virtual
    return {
        "ranks": team.size,
        "virtual_ranks": None if virtual is None else virtual.count,
        "parts": team.parts,
        "backend": keras.backend.backend(),
        "optimizers": likeness.optimizers_of(trained.models),
        "variables": [_described(variable, slots) for variable in common],
        "own": [[name, kind, array.dtype.name, list(array.shape)] for name, kind, array in own],
        "differing": differing,
        "local": local,
        "late": [[number, place, [[a.dtype.name, list(a.shape)] for a in arrays]] for number, place, arrays in late],
    }, arrays


def prepare(trained: Trained, places: Places, memory: Memory) -> None:
    """Begin to get the memory that `take` will need, if this rank can tell alone how much that is."""
    if places.group and (places.together or not shared_out.slots_of(trained.models)):
        memory.prepare(_large(trained, places))


def _large(trained: Trained, places: Places) -> dict[str, np.ndarray]:
    """Return this rank's share of the variables. Collective where optimizers are sharded and not all write together."""
    common, slots, team = _common_variables(trained), shared_out.slots_of(trained.models), trained.team
    pieces = dict(shared_out.pieces(common, slots, team, places.together))
    if not places.group:
        return {}
    views = dict(_views(common, slots, places.group.index(team.rank), len(places.group)))
    return views | pieces if places.together or places.leads else views


def _views(common: Sequence[Any], slots: Slots, rank: int, ranks: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield this rank's share of the variables that are alike, or of their rows, with names."""
    view = backends.current().view
    dealt = [0] * ranks  # bytes
    for index, variable in enumerate(common):
        if id(variable) in slots:
            continue
        size, rows = _size_of(variable), variable.shape[0] if len(variable.shape) else 1
        # Where one rank writes alone, variables stay whole.
        pieces = min(rows, -(-size // _PIECE_BYTES)) if ranks > 1 else 1
        value = None
        for piece in range(max(1, pieces)):
            who = dealt.index(min(dealt))
            dealt[who] += size // max(1, pieces)
            if who != rank:
                continue
            if value is None:
                value = np.asarray(view(variable))
                if not tensors.holds(value.dtype.name):
                    value = bytes_of(np.asarray(value, order="C")).reshape(rows, -1)
            if pieces <= 1:
                yield f"variable{index} {variable.path}", value
            else:
                start, stop = (rows * end // pieces for end in (piece, piece + 1))
                yield f"variable{index}[{start}:{stop}] {variable.path}", value[start:stop]


def _whole_variables(arrays: dict[str, np.ndarray]) -> dict[int, list[np.ndarray]]:
    """Return the pieces of variables, in order, by the variables' numbers."""
    found: dict[int, list[tuple[int, np.ndarray]]] = {}
    for name, array in arrays.items():
        match = _NAME.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), []).append((int(match[2] or 0), array))
    return {index: [array for _, array in sorted(pieces, key=lambda p: p[0])] for index, pieces in found.items()}


def check(trained: Trained, facts: dict[str, Any]) -> str:
    """Raise unless models are like those that `take` described.

    Returns:
        What is to be said, or nothing.

    Raises:
        ValueError: naming the first difference.
    """
    if facts["backend"] != keras.backend.backend():
        raise ValueError(
            f"The checkpoint was made with another backend of Keras. Expected {facts['backend']!r}. Received: "
            f"{keras.backend.backend()!r}"
        )
    virtual = current.job().virtual
    here = None if virtual is None else virtual.count
    if facts.get("virtual_ranks") != here:
        raise ValueError(
            "The checkpoint was made with other virtual ranks. Expected init(virtual_ranks="
            f"{facts.get('virtual_ranks')}), or another path, which begins anew. Received: virtual_ranks={here}"
        )
    optimizers = likeness.optimizers_of(trained.models)
    likeness.check_optimizers(facts.get("optimizers", optimizers), optimizers)  # older ones do not say
    local_states.expect(trained.models, facts.get("local", ()))
    saved = {kind for _, kind, *_ in facts["own"]}
    if _BUFFER not in saved and variables.buffers(*trained.models):
        current.notice("Checkpoint: an older one, without buffers of modules of PyTorch: they stay as they are here")
    own = [_described(v, {}) for kind, v in _own_variables(trained) if kind != _BUFFER or kind in saved]
    theirs = [
        *facts["variables"],
        *(
            [name, dtype, shape[1:] if kind == _PARTS else shape]
            for name, kind, dtype, shape in facts["own"]
            if kind not in (_RANDOM, _SENT)
        ),
    ]
    slots = shared_out.slots_of(trained.models)
    return likeness.check_variables(theirs, [*(_described(v, slots) for v in _common_variables(trained)), *own])


def put_back(trained: Trained, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Give models, optimizers and random generators of all ranks what `take` has taken. Collective.

    Of virtual ranks all is as it was, on any number of ranks. Else, on another number of ranks, or in groups of another
    size, all get what is alike, the mean of each rank's statistics and waiting gradients, no running metrics, and
    random states that are new for all but the first.

    Args:
        trained: `check` found it to fit.
        facts: on every rank.
        arrays: on the team's first rank.
    """
    team, backend = trained.team, backends.current()
    local_states.expect(trained.models, facts.get("local", ()))
    common, slots = _common_variables(trained), shared_out.slots_of(trained.models)
    found = _whole_variables(arrays)
    for index, variable in enumerate(common):
        _, dtype, shape = facts["variables"][index]
        value = shared_out.joined(found[index]) if team.rank == 0 else None
        if id(variable) in slots:
            raw = share(team, None if value is None else bytes_of(value))
            backend.assign(variable, slots[id(variable)][1].part_of(raw.view(dtype_of(dtype)).reshape(shape)))
        elif value is not None:
            backend.assign(variable, value.view(dtype_of(dtype)).reshape(shape))
    variables.broadcast_variables(team, [variable for variable in common if id(variable) not in slots])
    specs = [(dtype, shape) for _, _, dtype, shape in facts["own"]]
    differing = set(facts["differing"])
    virtual = current.job().virtual
    elsewhere = arranged(facts) != arranged({"ranks": team.size, "parts": team.parts})
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
    own_variables = iter(_own_variables(trained))
    sent = {}
    for (name, kind, *_), value in zip(facts["own"], values, strict=True):
        if kind == _RANDOM:
            random_states.put_back(name, value)
            continue
        if kind == _SENT:
            sent[name] = value
            continue
        variable = next(own_variables)[1]
        if virtual is not None:
            virtual.states.forget([variable])
        if virtual is not None and kind == _PARTS:
            for part in virtual.mine:
                virtual.states.put(part, [variable], [backend.from_numpy(value[part], variable.value)])
            value = value[virtual.mine[-1]]
        backend.assign(variable, value)
    if elsewhere and virtual is None:
        current.job().streams.clear()  # of each rank: new ones
    local = facts.get("local", ())
    shared = {name: share(team, arrays.get(name)) for name in local_states.shared(local)}
    local_states.restore(trained.models, local, shared | sent, anew=elsewhere)
    late = []
    for i, (number, place, described) in enumerate(facts["late"]):
        averages = [share(team, arrays.get(f"late{i}_{j}")) for j in range(len(described))]
        shaped = zip(averages, described, strict=True)
        late.append((number, place, [a.view(dtype_of(dtype)).reshape(shape) for a, (dtype, shape) in shaped]))
    delayed.restore(trained.models, late)


def arranged(facts: dict[str, Any]) -> str:
    """Return how many ranks there are, and how many compute each sample together, in words."""
    ranks, parts = facts["ranks"], facts.get("parts", 1)
    return f"{ranks} rank{'s' * (ranks > 1)}" + (f" in groups of {parts}" if parts > 1 else "")


def share(team: Any, array: np.ndarray | None, root: int = 0) -> np.ndarray:
    """Return the bytes that one of the team's ranks has. Collective.

    Args:
        team: who shares.
        array: on that rank, bytes; of others it is not read.
        root: the rank.
    """
    length = np.array([0 if array is None or team.rank != root else array.size], np.int64)
    team.broadcast(length, root)
    buffer = array if team.rank == root and array is not None else np.empty(int(length[0]), np.uint8)
    if length[0]:
        buffer = np.ascontiguousarray(buffer)
        team.broadcast(buffer, root)
    return buffer


def share_object(team: Any, value: Any) -> Any:
    """Return what the team's first rank passes, which JSON can hold. Collective."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy() if team.rank == 0 else None
    return json.loads(share(team, text).tobytes())


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
        if kind == _METRIC and facts.get("virtual_ranks") is None:
            value = np.zeros_like(value)
        elif kind in (_STATE, _BUFFER) and len(of_ranks) > 1 and keras.backend.is_float_dtype(dtype):
            value = np.mean([a.astype(np.float64) for a in of_ranks], axis=0).astype(value.dtype)
        values.append(value)
    return _joined(values)


def _common_variables(trained: Trained) -> list[Any]:
    own = {id(variable) for _, variable in _own_variables(trained)}
    found = variables.unique(v for model in trained.models for v in variables.common_variables(model))
    return [variable for variable in found if id(variable) not in own]


def _own_variables(trained: Trained) -> list[tuple[str, Any]]:
    """What a rank's own samples and random numbers change, with its kind."""
    found: dict[int, tuple[str, Any]] = {}
    for model in trained.models:
        for kind, kept in (
            (_SEED, [generator.state for generator in variables.seed_generators(model)]),
            (_METRIC, model.metrics_variables if trained.metrics else ()),
            (_STATE, variables.accumulators(model)),
            (_STATE, variables.per_rank_state(model)),
            (_STATE, local_states.own_variables([model])),
        ):
            for variable in kept:
                found.setdefault(id(variable), (kind, variable))
    return [*found.values(), *((_BUFFER, buffer) for buffer in variables.buffers(*trained.models))]


def _own(trained: Trained) -> list[tuple[str, str, np.ndarray]]:
    """The same with the values, and the random states of libraries: name, kind, value."""
    to_numpy, virtual = backends.current().to_numpy, current.job().virtual
    own = _own_variables(trained)
    of_parts: dict[int, np.ndarray] = {}
    if virtual is not None:
        several = [v for kind, v in own if kind != _SEED and virtual.states.has(v)]
        of_parts = dict(zip(map(id, several), virtual.states.gather(trained.team, several), strict=True))
    found = [
        (v.path, _PARTS, of_parts[id(v)]) if id(v) in of_parts else (v.path, kind, np.asarray(to_numpy(v), order="C"))
        for kind, v in own
    ]
    return [*found, *((name, _RANDOM, value) for name, value in random_states.take().items())]


def _shape_of(variable: Any, slots: Slots) -> list[int]:
    return list(slots[id(variable)][1].shape if id(variable) in slots else variable.shape)


def _described(variable: Any, slots: Slots) -> list[Any]:
    return [variable.path, standard_dtype(variable), _shape_of(variable, slots)]


def _size_of(variable: Any, slots: Slots | None = None) -> int:
    return int(np.prod(_shape_of(variable, slots or {}))) * dtype_of(standard_dtype(variable)).itemsize


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
