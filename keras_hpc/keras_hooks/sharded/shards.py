# SPDX-License-Identifier: Apache-2.0
"""What this rank keeps of an optimizer: state for its pieces of the variables, made when the optimizer is built.

The optimizer is given a *stand-in* for each variable: the variable itself where this rank updates all of it, the rows
or elements that it updates (at most one variable begins, and one ends, in the middle on a rank), or nothing, a variable
of shape (0,). Whatever it keeps for a variable is made with the stand-in's shape.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import xxhash

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.sharded import kinds
from keras_hpc.keras_hooks.sharded.layout import Piece, deal
from keras_hpc.keras_hooks.state import variables as model_variables

_ACCUMULATOR = "gradient_accumulator"  # Keras' name of gradients that wait for more, which each rank has whole
# What Adafactor keeps for rows and columns has a shape of its own: small, so all ranks hold it, and the owner's counts.
_HELD_BY_ALL = ("_r", "_c")


@dataclasses.dataclass(frozen=True)
class Slot:
    """What an optimizer keeps for one variable.

    Attributes:
        pieces: of it, in order.
        shape: of all of it.
        mine: the piece that this rank keeps, or None.
        held_whole: whether this rank has memory for all of it, of which `mine` is up to date.
    """

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    mine: Piece | None
    held_whole: bool = False

    def part_of(self, whole: np.ndarray) -> np.ndarray:
        """Return what this rank keeps of an array of all of it."""
        if self.held_whole or (self.mine is not None and self.mine.shape == self.shape):
            return whole
        if self.mine is None:
            return np.empty(0, whole.dtype)
        return whole.reshape(-1)[self.mine.start : self.mine.stop].reshape(self.mine.shape)


class Shards:
    """How an optimizer's variables are shared out. The same on every rank, but for what is this rank's own.

    Args:
        optimizer: one that holds no others, and is about to be built.
        variables: what it trains.

    Attributes:
        team: the ranks that share them.
        variables: the same.
        cut: whether a variable may be of several ranks.
        pieces: of each variable; none of one that every rank updates by itself.
        loaded: digests of what the optimizer has begun with, loaded or been set to, since ranks compared them last;
            empty text where that is this rank's part.
        is_complete: whether it is known what the optimizer keeps.
        stand_ins: for each variable, what this rank's optimizer updates.

    Raises:
        ValueError: the optimizer looks across variables.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        kinds.check(optimizer)
        self.team = current.team_of(optimizer)
        self.variables = list(variables)
        self.cut = kinds.cuts(optimizer)
        self._index = {id(variable): index for index, variable in enumerate(self.variables)}
        local = model_variables.known_local()
        shared = [
            index
            for index, v in enumerate(self.variables)
            if id(v) not in local and not getattr(v, "overwrite_with_gradient", False)
        ]
        dealt = deal([tuple(self.variables[i].shape) for i in shared], self.team.size, cut=self.cut)
        self.pieces: list[tuple[Piece, ...]] = [()] * len(self.variables)
        for index, pieces in zip(shared, dealt, strict=True):
            self.pieces[index] = pieces
        self.stand_ins = list(map(self._stand_in, range(len(self.variables))))
        self._slots: dict[int, Slot] = {}
        self.loaded: list[str] = []
        self.is_complete = False
        self._kept: list[Any] = []  # the slots, so that their ids are not reused

    def index_of(self, variable: Any) -> int | None:
        """Return a variable's number, or None if the optimizer does not train it."""
        return self._index.get(id(variable))

    def mine(self, index: int) -> Piece | None:
        """Return what this rank updates of a shared variable."""
        found = [piece for piece in self.pieces[index] if piece.rank == self.team.rank]
        return found[0] if found else None

    def is_mine(self, index: int) -> bool:
        """Return whether this rank updates all of a variable, itself."""
        return self.stand_ins[index] is self.variables[index]

    def slot(self, variable: Any) -> Slot | None:
        """Return how a variable of the optimizer is shared out, or None if it is alike on all ranks."""
        return self._slots.get(id(variable))

    @property
    def slots(self) -> list[tuple[Any, Slot]]:
        """The variables of the optimizer that are shared out, in the order in which they were made."""
        return [(variable, self._slots[id(variable)]) for variable in self._kept]

    def make_slot(self, original: Callable[..., Any], optimizer: Any, reference: Any, name: str, start: Any) -> Any:
        """Make what the optimizer keeps for a variable: a part of it, as Keras' `add_variable_from_reference`."""
        index = self.index_of(reference)
        if index is None or not self.pieces[index] or name == _ACCUMULATOR:
            return original(optimizer, reference, name, start)
        mine = self.mine(index)
        described = types.SimpleNamespace(
            name=reference.name,
            shape=(0,) if mine is None else mine.shape,
            dtype=keras.backend.standardize_dtype(reference.dtype),
            _layout=None,
        )
        if hasattr(reference, "path"):
            described.path = reference.path
        made = original(optimizer, described, name, start)
        self._note(made, Slot(self.pieces[index], tuple(reference.shape), mine))
        return made

    def first_value(self, variable: Any, value: Any) -> Any:
        """Return what a variable of an optimizer that is being built begins with, given it, or all ranks' together."""
        slot = self.slot(variable)
        if slot is None or tuple(value.shape) != slot.shape:
            return value
        whole = backends.current().to_numpy(value)
        # The weights that it comes from may differ between ranks still.
        self.loaded.append(digest(whole))
        return slot.part_of(whole)

    def complete(self, optimizer: Any) -> None:
        """Know all that a built optimizer keeps, and let it know its stand-ins. Does nothing the next time.

        Raises:
            ValueError: it keeps something of which nobody knows what for.
        """
        if self.is_complete:
            return
        for name in _HELD_BY_ALL:
            for index, made in enumerate(getattr(optimizer, name, None) or ()):
                if made is not None and self.pieces[index] and id(made) not in self._slots and len(made.shape):
                    shape = tuple(made.shape)
                    piece = Piece(self.pieces[index][0].rank, 0, math.prod(shape), shape)
                    self._note(made, Slot((piece,), shape, piece if self.mine(index) else None, held_whole=True))
        alike = {id(v) for v in model_variables.waiting(optimizer)}
        for made in optimizer.variables:
            if id(made) in self._slots or id(made) in alike or not len(made.shape):
                continue
            if any(v is not None and id(v) == id(made) for v in self._own_of_all(optimizer)):
                continue
            raise ValueError(
                "init(shard_optimizer=True) shares out what an optimizer keeps for each variable. Expected that its "
                "`build` makes it with `add_variable_from_reference` or `add_optimizer_variables`; or "
                f"init(shard_optimizer=False). Received: {type(optimizer).__name__} with `{made.path}` of shape "
                f"{tuple(made.shape)}"
            )
        indices = optimizer._trainable_variables_indices
        for index, stand_in in enumerate(self.stand_ins):
            indices[optimizer._var_key(stand_in)] = index
        self.is_complete = True

    def _own_of_all(self, optimizer: Any) -> list[Any]:
        """Return what every rank keeps for the variables that it updates by itself."""
        everywhere = [i for i, pieces in enumerate(self.pieces) if not pieces]
        lists = [v for v in vars(optimizer).values() if isinstance(v, list) and len(v) == len(self.variables)]
        return [values[i] for values in lists for i in everywhere]

    def _note(self, made: Any, slot: Slot) -> None:
        self._slots[id(made)] = slot
        self._kept.append(made)

    def _stand_in(self, index: int) -> Any:
        variable, pieces, mine = self.variables[index], self.pieces[index], self.mine(index)
        if not pieces or (mine is not None and len(pieces) == 1):
            return variable
        made = keras.Variable(
            keras.initializers.Zeros(),
            shape=(0,) if mine is None else mine.shape,
            dtype=keras.backend.standardize_dtype(variable.dtype),
            trainable=False,
            name=running.plain_name(variable).replace("/", "_") or "variable",
        )
        made._path = getattr(variable, "path", made.path)
        backends.current().pieces.let_go(made)
        return made


def digest(value: np.ndarray) -> str:
    """Return a digest of an array's bits."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(value).tobytes())


def of(optimizer: Any) -> Shards | None:
    """Return how an optimizer is shared out, or None: it is whole on every rank."""
    if not current.is_initialized():
        return None
    shards: Shards | None = current.job().known.optimizer(optimizer).shards
    return shards


def wanted(optimizer: Any) -> bool:
    """Return whether an optimizer that is built now is to be sharded."""
    return (
        current.is_initialized()
        and current.job().shard_optimizer
        and current.active()
        and current.team_of(optimizer).size > 1
        and not model_variables.held_optimizers(optimizer)
        and not kinds.keeps_nothing(optimizer)  # weights would travel twice and no byte be saved
    )
