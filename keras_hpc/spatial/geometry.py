# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of a split sample: which rows a part owns, which it reads, who sends what. Plain numbers, no framework.

All positions are rows of one axis, counted over the whole sample. An axis of `extent` rows in `parts` parts is cut by
its extent alone, whatever layer made the tensor (`bounds`). So two tensors of one extent are cut alike, and layers that
combine them need no communication.

What a layer reads is a *window* for each part: rows [begin, end), which may overlap with other windows, reach over
several parts, and lie outside of [0, extent), where there is padding. `move` says how a part gets its window.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Iterable, Sequence

Rows = tuple[int, int]  # [begin, end)


def bounds(extent: int, parts: int) -> list[Rows]:
    """Return the rows that each part owns. Parts differ by one row at most."""
    return [(extent * part // parts, extent * (part + 1) // parts) for part in range(parts)]


def same_padding(extent: int, width: int, stride: int) -> int:
    """Return how many rows `padding="same"` puts before the first one."""
    outputs = -(-extent // stride)
    return max((outputs - 1) * stride + width - extent, 0) // 2


def reshaped(before: Sequence[int | None], after: Sequence[int | None], parts: Sequence[int]) -> frozenset[int]:
    """Return along which axes each part of a tensor that is reshaped is just this part of the result.

    None where samples are not kept, as where rows become samples: then positions of all parts lie between others.
    Axes are merged and divided in runs: the extents of some neighbours before have the product of some afterwards. Of
    a run only the first axis can be cut, if that is one axis before and afterwards, and cut at the same numbers.

    Args:
        before: extents, of which the first, of samples, may be unknown.
        after: likewise.
        parts: into how many each axis behind the first is cut; 1 where none is said.
    """
    shapes = [n or 0 for n in before], [n or 0 for n in after]
    if before[0] != after[0] or math.prod(shapes[0][1:]) != math.prod(shapes[1][1:]):
        return frozenset()
    found, begins = {0}, [1, 1]
    while all(begin < len(shape) for begin, shape in zip(begins, shapes, strict=True)):
        firsts = [shape[begin] for begin, shape in zip(begins, shapes, strict=True)]
        sizes, ends = list(firsts), [begin + 1 for begin in begins]
        while sizes[0] != sizes[1]:
            less = sizes.index(min(sizes))
            if ends[less] == len(shapes[less]):
                return frozenset(found)
            sizes[less] *= shapes[less][ends[less]]
            ends[less] += 1
        if 0 in firsts:
            return frozenset(found)
        axis = begins[0]
        count = parts[axis - 1] if axis <= len(parts) else 1
        cuts = [[end * size // n for _, end in bounds(n, count)] for n, size in zip(firsts, sizes, strict=True)]
        if axis == begins[1] and cuts[0] == cuts[1]:
            found.add(axis)
        begins = ends
    return frozenset(found)


@dataclasses.dataclass(frozen=True)
class Windowed:
    """One axis of a convolution or pooling: output row j reads [j stride - before, j stride - before + width).

    Padding and cropping are windows of one row that are shifted.

    Attributes:
        extent: rows of the input.
        outputs: rows of the output.
        width: of the window, dilation included.
        stride: how far the windows of neighbouring output rows are apart.
        before: rows of padding before the first row; negative: rows that are cut off.
    """

    extent: int
    outputs: int
    width: int = 1
    stride: int = 1
    before: int = 0

    @classmethod
    def of_layer(cls, extent: int, kernel: int, stride: int, dilation: int, padding: str) -> Windowed:
        """Return the axis of a layer of Keras with `padding` "valid", "same" or "causal"."""
        width = (kernel - 1) * dilation + 1
        if padding == "valid":
            return cls(extent, max((extent - width) // stride + 1, 0), width, stride)
        before = width - 1 if padding == "causal" else same_padding(extent, width, stride)
        return cls(extent, -(-extent // stride), width, stride, before)

    @property
    def sides(self) -> Rows:
        """Rows of padding before the first row and after the last one."""
        after = (self.outputs - 1) * self.stride - self.before + self.width - self.extent
        return max(self.before, 0), max(after, 0)

    def window(self, begin: int, end: int) -> Rows:
        """Return the input rows that the output rows [begin, end) read."""
        return begin * self.stride - self.before, (end - 1) * self.stride - self.before + self.width

    def crop(self, begin: int, end: int) -> Rows:
        """Return where the output rows [begin, end) lie in the layer's result, without padding, for their window."""
        return 0, end - begin

    def counts(self, begin: int, end: int) -> list[int]:
        """Return for each of the output rows [begin, end) how many rows of the input it reads, padding left out."""
        windows = (self.window(row, row + 1) for row in range(begin, end))
        return [min(last, self.extent) - max(first, 0) for first, last in windows]


@dataclasses.dataclass(frozen=True)
class Transposed:
    """One axis of a transposed convolution: input row j adds to output rows [j stride - cut, j stride - cut + width).

    Attributes:
        extent: rows of the input.
        outputs: rows of the output.
        width: of the kernel, dilation included.
        stride: how far neighbouring input rows are apart in the output.
        cut: rows of the full result that are cut off in front.
    """

    extent: int
    outputs: int
    width: int
    stride: int
    cut: int

    @classmethod
    def of_layer(
        cls, extent: int, outputs: int, kernel: int, stride: int, dilation: int, padding: str, extra: int | None
    ) -> Transposed:
        """Return the axis of a layer of Keras. `extra` is its `output_padding`.

        Keras defines "same" by what JAX pads before and after the input, which is dilated by the stride: its
        `_convert_conv_transpose_padding_args_from_keras_to_jax`.
        """
        width = (kernel - 1) * dilation + 1
        if padding == "valid":
            return cls(extent, outputs, width, stride, 0)
        both = stride + width - 2 if extra is None else width + width % 2 - 2 + extra
        return cls(extent, outputs, width, stride, width - 1 - min(-(-both // 2), width - 1))

    def window(self, begin: int, end: int) -> Rows:
        """Return the input rows that add to the output rows [begin, end), at least one.

        With a stride that is larger than the kernel there are output rows to which none adds; then it is a row before.
        """
        first = -((self.width - 1 - begin - self.cut) // self.stride)
        last = (end - 1 + self.cut) // self.stride
        return min(first, (begin + self.cut) // self.stride), last + 1

    def crop(self, begin: int, end: int) -> Rows:
        """Return where the output rows [begin, end) lie in the layer's result, without padding, for their window."""
        first = self.window(begin, end)[0] * self.stride - self.cut
        return begin - first, end - first


@dataclasses.dataclass(frozen=True)
class Upsampled:
    """One axis of an upsampling: a row becomes `factor` rows, interpolated with `reach` neighbours.

    Attributes:
        extent: rows of the input.
        factor: rows of the output for each of them.
        reach: 0 where rows are repeated, 1 for linear interpolation.
    """

    extent: int
    factor: int
    reach: int = 0

    @property
    def outputs(self) -> int:
        """Rows of the output."""
        return self.extent * self.factor

    def window(self, begin: int, end: int) -> Rows:
        """Return the input rows that the output rows [begin, end) are made of, at the edges without padding."""
        first, last = begin // self.factor - self.reach, (end - 1) // self.factor + 1 + self.reach
        return max(first, 0), min(last, self.extent)

    def crop(self, begin: int, end: int) -> Rows:
        """Return where the output rows [begin, end) lie in the layer's result for their window."""
        first = self.window(begin, end)[0] * self.factor
        return begin - first, end - first


Axis = Windowed | Transposed | Upsampled


@dataclasses.dataclass(frozen=True)
class Move:
    """What one part does to get its window of an axis.

    It then has, in this order: padding, what lower parts sent, own rows, what upper parts sent, padding. The adjoint
    goes the same way back: gradients of received rows return to their owners, who add them up; those of padding are
    dropped.

    Attributes:
        extent: rows that this part has.
        own: those of them that it keeps; (0, 0) for none.
        sends: (part, rows of this part), ascending.
        receives: (part, number of rows), ascending.
        lower: how many of `receives` come from lower parts.
        pads: rows of padding before and after.
    """

    extent: int
    own: Rows
    sends: tuple[tuple[int, Rows], ...]
    receives: tuple[tuple[int, int], ...]
    lower: int
    pads: Rows

    @property
    def rows(self) -> int:
        """How many rows the part then has."""
        return sum(self.pads) + self.own[1] - self.own[0] + self.received

    @property
    def received(self) -> int:
        """How many rows it receives."""
        return sum(rows for _, rows in self.receives)

    @property
    def borders(self) -> Move:
        """The same of a tensor that has only the rows that are sent, one block after the other, and keeps none."""
        ends = list(itertools.accumulate(end - begin for _, (begin, end) in self.sends))
        blocks = zip([0, *ends], ends, strict=False)
        sends = tuple((other, rows) for (other, _), rows in zip(self.sends, blocks, strict=True))
        return dataclasses.replace(self, extent=ends[-1] if ends else 0, own=(0, 0), sends=sends, pads=(0, 0))


def _common(first: Rows, second: Rows) -> Rows | None:
    begin, end = max(first[0], second[0]), min(first[1], second[1])
    return (begin, end) if begin < end else None


def move(extent: int, parts: int, windows: Sequence[Rows], part: int, everywhere: bool = False) -> Move:
    """Return how a part gets its window.

    Args:
        extent: rows of the axis.
        parts: into how many parts it is cut.
        windows: the rows that each part reads.
        part: which one.
        everywhere: every part has all rows already, so nothing is sent.
    """
    owned = bounds(extent, parts)
    mine, wanted = (0, extent) if everywhere else owned[part], windows[part]
    own = _common(mine, wanted)
    others = [] if everywhere else [other for other in range(parts) if other != part]
    sends = [(other, _common(mine, windows[other])) for other in others]
    receives = [(other, _common(owned[other], wanted)) for other in others]
    size = wanted[1] - wanted[0]
    return Move(
        extent=mine[1] - mine[0],
        own=(own[0] - mine[0], own[1] - mine[0]) if own else (0, 0),
        sends=tuple((other, (rows[0] - mine[0], rows[1] - mine[0])) for other, rows in sends if rows),
        receives=tuple((other, rows[1] - rows[0]) for other, rows in receives if rows),
        lower=sum(other < part for other, rows in receives if rows),
        pads=(max(0, min(-wanted[0], size)), max(0, min(wanted[1] - extent, size))),
    )


@dataclasses.dataclass(frozen=True)
class Border:
    """Rows of other parts on one side of a part, and what a convolution makes of them.

    A convolution of a part's own rows, as "same" pads them with zeros, lacks what the rows of other parts add to the
    first and last rows of its output. The convolution is linear: so these rows alone, with zeros in the place of the
    part's own, give just that.

    Attributes:
        rows: how many rows come from other parts.
        pads: rows of zeros before and after them, with which the layer's valid result is all that they add.
        outputs: the rows of the part's output to which that is added.
    """

    rows: int
    pads: Rows
    outputs: Rows

    @property
    def changes(self) -> bool:
        """Whether there is any such row of the output, though it may be an edge of the image, where zeros are added."""
        return self.outputs[0] < self.outputs[1]


def borders(axis: Windowed, parts: int, part: int) -> tuple[Border, Border] | None:
    """Return what rows of lower and of upper parts add to a part's output.

    None: "same" does not pad the part's own rows as the windows of its output rows reach over them, or not at all.

    Args:
        axis: of a convolution, whose input and output are both split.
        parts: into how many parts.
        part: which one.
    """
    (first, last), (begin, end) = bounds(axis.extent, parts)[part], bounds(axis.outputs, parts)[part]
    lowest, highest = axis.window(begin, end)
    before, after, own, count = first - lowest, highest - last, last - first, end - begin
    fits = before == same_padding(own, axis.width, axis.stride) and count == -(-own // axis.stride) and after >= 0
    if not fits or count == 0 or before == after == 0:
        return None
    # Output rows whose windows begin before this part's rows, and the first one whose window ends after them.
    upper = min(-(-before // axis.stride), count)
    lower = max((own + before - axis.width) // axis.stride + 1, 0)
    from_lower, from_upper = first - max(lowest, 0), min(highest, axis.extent) - last
    return (
        Border(from_lower, (before - from_lower, (upper - 1) * axis.stride + axis.width - before), (0, upper)),
        Border(from_upper, (own + before - lower * axis.stride, after - from_upper), (lower, count)),
    )


@dataclasses.dataclass(frozen=True)
class Grid:
    """The ranks of a group, arranged row-major along the axes that are split.

    Attributes:
        parts: how many along each spatial axis, at least one.
    """

    parts: tuple[int, ...]

    @classmethod
    def of(cls, parts: int | Sequence[int]) -> Grid:
        """Return the grid of what a user gives as `parts`: a number for each spatial axis, an int for the first one.

        Raises:
            ValueError: it is something else.
        """
        given = tuple(parts) if isinstance(parts, Iterable) else (parts,)
        known = all(isinstance(n, (int, numbers.Integral)) and not isinstance(n, bool) and n > 0 for n in given)
        if not known or not 1 <= len(given) <= 3:
            raise ValueError(
                "A sample is split into a number of parts along each of its one to three spatial axes. Expected a "
                f"positive int, or a tuple of them, such as (2, 1). Received: {parts!r}"
            )
        while len(given) > 1 and given[-1] == 1:  # so (2, 1) is for models of one axis, too
            given = given[:-1]
        return cls(tuple(map(int, given)))

    @property
    def size(self) -> int:
        """How many ranks compute a sample together."""
        return math.prod(self.parts)

    def place(self, rank: int) -> tuple[int, ...]:
        """Return the part of each axis that a rank of the group has."""
        found = []
        for parts in reversed(self.parts):
            rank, part = divmod(rank, parts)
            found.append(part)
        return tuple(reversed(found))

    def rank(self, place: Sequence[int]) -> int:
        """Return the rank in the group that has these parts."""
        found = 0
        for part, parts in zip(place, self.parts, strict=True):
            found = found * parts + part
        return found

    def line(self, rank: int, axis: int) -> list[int]:
        """Return the ranks that differ from one in its part of an axis only, itself among them, by that part."""
        place = self.place(rank)
        return [self.rank((*place[:axis], part, *place[axis + 1 :])) for part in range(self.parts[axis])]
