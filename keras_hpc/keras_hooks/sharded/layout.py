# SPDX-License-Identifier: Apache-2.0
"""Which rank updates which elements of which variable. Plain arithmetic, the same on every rank."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

# Cuts are at multiples of so many elements from a variable's beginning. Processors compute some operations with other
# bits in vectors than one by one, as 1 / sqrt(x) in TensorFlow; so what is in a vector stays in one.
_VECTOR = 32
# A variable is cut between rows, too, where there are so many places for each rank: its share stays so within 1 %.
_PLACES = 64
# A cut so near to an end of a variable, in parts of a rank's share, is made there: what is cut is copied on TensorFlow
# and JAX.
_NEAR = 128


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbouring elements of a variable in C order, that one rank updates.

    Attributes:
        rank: who updates them.
        start: the first of them.
        stop: the one after the last.
        shape: they have it: that of the variable if they are all of it, else whole rows, or one axis.
    """

    rank: int
    start: int
    stop: int
    shape: tuple[int, ...]


def deal(shapes: Sequence[tuple[int, ...]], ranks: int, *, cut: bool) -> list[tuple[Piece, ...]]:
    """Deal the elements of variables to ranks so that each has as many.

    Args:
        shapes: of the variables.
        ranks: how many ranks there are.
        cut: whether a variable may be cut. Then each rank has one range of all elements one after the other, and shares
            differ by 32 elements, or by 1 % where that is more. Else each variable is of one rank, the largest first,
            each to whoever has the least.

    Returns:
        The pieces of each variable, in order of their elements and ranks.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if not cut:
        return _whole(shapes, sizes, ranks)
    total, first = sum(sizes), 0
    near = total // (ranks * _NEAR)
    found = []
    for shape, size in zip(shapes, sizes, strict=True):
        row = size // shape[0] if len(shape) > 1 and size else 1
        unit = math.lcm(row, _VECTOR)
        if unit * _PLACES * ranks > size:
            row, unit = 1, _VECTOR
        bounds = [0, *(_nearest(total * r // ranks - first, unit, size, near) for r in range(1, ranks)), size]
        pieces = [
            Piece(r, start, stop, shape if stop - start == size else _shape(shape, start, stop, row))
            for r, (start, stop) in enumerate(itertools.pairwise(bounds))
            if stop > start
        ]
        # One without elements needs somebody to update it, too.
        found.append(tuple(pieces) or (Piece(min(ranks - 1, first * ranks // max(total, 1)), 0, 0, shape),))
        first += size
    return found


def _whole(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], ranks: int) -> list[tuple[Piece, ...]]:
    dealt = [0] * ranks
    owner = {}
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner[index] = dealt.index(min(dealt))
        dealt[owner[index]] += sizes[index]
    return [(Piece(owner[i], 0, sizes[i], tuple(shape)),) for i, shape in enumerate(shapes)]


def _nearest(position: int, unit: int, size: int, near: int) -> int:
    """Return where a variable is cut: at an end that is near to a position, or the nearest multiple of a unit."""
    if min(position, size - position) <= near:
        return 0 if position < size - position else size
    return min((position + unit // 2) // unit * unit, size)


def _shape(shape: tuple[int, ...], start: int, stop: int, row: int) -> tuple[int, ...]:
    return ((stop - start) // row, *shape[1:]) if row > 1 else (stop - start,)
