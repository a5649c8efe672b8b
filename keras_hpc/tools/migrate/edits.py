# SPDX-License-Identifier: Apache-2.0
"""Changes of a source text at places that `ast` names; all else stays as its author wrote it."""

from __future__ import annotations

import ast
import codecs
import re
from collections.abc import Iterable, Sequence

_CLOSE = bytes.maketrans(b"([{", b")]}")
_GAP = re.compile(rb"(?:[ \t]|\\\n|\n|#[^\n]*)*")


class Source:
    """A text and the changes that it will get.

    Args:
        text: UTF-8.
        name: of the file, for errors.
    """

    def __init__(self, text: bytes, name: str) -> None:
        self.text = text
        self.tree = ast.parse(text, name)
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        if text.startswith(codecs.BOM_UTF8):  # which ast does not count
            self._starts[0] = len(codecs.BOM_UTF8)
        self._edits: list[tuple[int, int, bytes]] = []

    def begin(self, node: ast.AST) -> int:
        """Return where a node begins, in bytes."""
        return int(self._starts[node.lineno - 1] + node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        """Return where a node ends, in bytes."""
        return int(self._starts[node.end_lineno - 1] + node.end_col_offset)  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> str:
        """Return the text of a node."""
        return self.text[self.begin(node) : self.end(node)].decode()

    def replace(self, node: ast.AST, text: str) -> None:
        """Put a text in the place of a node."""
        self._edits.append((self.begin(node), self.end(node), text.encode()))

    def keep_only(self, node: ast.AST, kept: ast.AST) -> None:
        """Put a part of a node in its place, which may be changed, too."""
        self._edits += [(self.begin(node), self.begin(kept), b""), (self.end(kept), self.end(node), b"")]

    def remove_elements(self, start: int, elements: Sequence[ast.AST], removed: Iterable[ast.AST]) -> None:
        """Take elements out of a list, or arguments out of a call, with their commas and the comments before them.

        Args:
            start: behind the opening bracket, in bytes.
            elements: all that stand between the brackets, in order.
            removed: some of them.
        """
        gone = set(map(id, removed))
        ends = []
        for element in elements:
            end = self.end(element)
            gap = _GAP.match(self.text, end)
            after = gap.end() if gap else end
            end = after + 1 if self.text[after : after + 1] == b"," else end
            remark = re.compile(rb"[ \t]*#[^\n]*|").match(self.text, end)
            ends.append(remark.end() if remark else end)
        begins = [start, *ends[:-1]]
        for index, element in enumerate(elements):
            if id(element) in gone:
                begin = begins[index]
                if index == len(elements) - 1:  # the comma before, too, if none stood behind the last one
                    kept = [i for i in range(index) if id(elements[i]) not in gone]
                    if kept and b"," not in self.text[self.end(element) : ends[index]]:
                        before = self.end(elements[kept[-1]])
                        comma = self.text.index(b",", before)
                        self._edits.append((before, comma + 1, b""))
                self._edits.append((begin, ends[index], b""))
        first = next((i for i, element in enumerate(elements) if id(element) not in gone), len(elements))
        if all(id(element) in gone for element in elements):  # nothing between the brackets then, not even a line
            self._edits.append((start, self.text.index(self.text[start - 1 :].translate(_CLOSE)[:1], ends[-1]), b""))
            return
        if first:  # what follows the bracket then: no blank line, no blank
            behind = ends[first - 1]
            blank = re.compile(rb"[ \t]*\n(?=[ \t]*\n)|[ \t]+(?!\n)|").match(self.text, behind)
            if blank and blank.end() > behind:
                self._edits.append((behind, blank.end(), b""))

    def remove_statement(self, statement: ast.stmt, block: Sequence[ast.stmt]) -> None:
        """Take a statement out, with the comments right above it that speak of Horovod.

        Args:
            statement: to remove.
            block: what it stands in; where nothing else does, `pass` takes its place.
        """
        if len(block) == 1:
            self.replace(statement, "pass")
            return
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        if any(other is not statement and first <= (other.end_lineno or 0) and other.lineno <= last for other in block):
            self.replace(statement, "pass")  # it shares a line
            return
        comments = first
        while comments > 1 and self._line(comments - 1).lstrip().startswith(b"#"):
            comments -= 1
        if b"horovod" in b"".join(self._line(n) for n in range(comments, first)).lower():
            first = comments
        if self._line(first - 1).strip() == b"" and self._line(last + 1).strip() == b"" and first > 1:
            last += last < len(self._starts) - 1
        self._edits.append((self._starts[first - 1], self._starts[last], b""))

    def remove_lines(self, first: int, last: int) -> None:
        """Take whole lines out, from 1, inclusive."""
        self._edits.append((self._starts[first - 1], self._starts[last], b""))

    def unwrap(self, statement: ast.If) -> None:
        """Put the body of an `if` without `else` in its place."""
        indent, inner = statement.col_offset, statement.body[0].col_offset
        self._edits.append((self._starts[statement.lineno - 1], self._starts[statement.body[0].lineno - 1], b""))
        for number in range(statement.body[0].lineno, (statement.end_lineno or 0) + 1):
            if self._line(number).strip():
                start = self._starts[number - 1]
                self._edits.append((start + indent, start + inner, b""))

    def comment_above(self, statement: ast.stmt, text: str) -> None:
        """Write a line of comment above a statement."""
        decorators = getattr(statement, "decorator_list", [])
        start = self._starts[min(one.lineno for one in [statement, *decorators]) - 1]
        indent = self.text[start : start + statement.col_offset]
        self._edits.append((start, start, (indent if not indent.strip() else b"") + f"# {text}\n".encode()))

    def result(self) -> bytes:
        """Return the changed text.

        What lies in a part that goes is gone with it.
        """
        parts: list[bytes] = []
        at = 0
        # At one place what is put in comes first, then the longest.
        edits = sorted(dict.fromkeys(self._edits), key=lambda edit: (edit[0], edit[1] != edit[0], -edit[1]))
        for begin, end, new in edits:
            if begin < at:
                if begin == end:  # a comment on what has gone
                    parts.append(new)
                at = max(at, end)
                continue
            parts += [self.text[at:begin], new]
            at = end
        return b"".join([*parts, self.text[at:]])

    def _line(self, number: int) -> bytes:
        if not 0 < number < len(self._starts):
            return b""
        return self.text[self._starts[number - 1] : self._starts[number]]
