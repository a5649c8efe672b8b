# SPDX-License-Identifier: Apache-2.0
"""WebDataset's tar files, by tarfile."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_hpc.data.files import open_file
from keras_hpc.data.stores.base import Store, record_block
from keras_hpc.data.stores.headers import Headers


class TarStore(Store):
    """Samples of a tar file: neighbouring members with the same name up to the first dot behind the last slash."""

    def __init__(self, path: str, fields: Sequence[str] | None = None) -> None:
        self.path, self.spec = path, {}
        self._file = open_file(path)
        extensions: dict[str, int] = {}  # with their numbers
        members: list[tuple[int, int, int]] = []  # where the content begins, its bytes, the number of the extension
        starts: list[int] = []  # the first member of each sample
        stems: set[str] = set()
        last = None
        try:
            headers: Any = Headers(self._file)
            with tarfile.open(fileobj=headers, mode="r:") as archive:
                entries: Any = archive
                while (member := archive.next()) is not None:
                    entries.members.clear()  # tarfile keeps all of them
                    stem, extension = _names(member)
                    if not extension or member.isdir():
                        continue
                    self._check(member)
                    if stem != last:
                        if stem in stems:
                            raise ValueError(
                                f"Files of one sample of {path} do not lie together. Expected those with a common name "
                                f"one after the other (tar --sort=name). Received: {member.name} behind {last}.*"
                            )
                        stems.add(stem)
                        starts.append(len(members))
                        kinds: set[str] = set()
                        last = stem
                    if extension in kinds:
                        raise ValueError(f"Expected each file of {path} once. Received: {member.name} twice")
                    kinds.add(extension)
                    kind = extensions.setdefault(extension, len(extensions))
                    members.append((member.offset_data, member.size, kind))
                self._check_end(archive.offset)
        except tarfile.TarError as error:
            raise ValueError(f"{path} cannot be read. Expected a tar file, uncompressed. Received: {error}") from error
        self._extensions = list(extensions)
        self._members = np.array(members, np.int64).reshape(-1, 3)
        self._starts = np.array([*starts, len(members)], np.int64)
        self._fields = fields
        self._check_fields(fields or ())
        self.block = record_block(self._members[:, 1].sum(), len(self))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`; see `Store`."""
        begin, end = self._bounds(start, stop)
        content = memoryview(bytearray(end - begin))
        self._file.read_at(begin, content)
        samples: list[dict[str, bytes]] = []
        for number in range(start, stop):
            members = self._members[self._starts[number] : self._starts[number + 1]]
            found = {
                self._extensions[kind]: bytes(content[place - begin : place - begin + size])
                for place, size, kind in members.tolist()
            }
            samples.append({name: found[name] for name in self._fields or found})
        return samples

    def touch(self, start: int, stop: int) -> None:
        """Bring samples near; see `Store`."""
        begin, end = self._bounds(start, stop)
        self._file.touch(begin, end - begin)

    def _bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Return between which bytes samples lie, and headers up to the next one: nothing is left out."""
        if start == stop:
            return 0, 0
        last = int(self._starts[stop])
        end = self._members[last, 0] if last < len(self._members) else self._members[-1, :2].sum()
        return int(self._members[self._starts[start], 0]), int(end)

    def _check(self, member: tarfile.TarInfo) -> None:
        """Raise ValueError if a member's content is not in one piece behind its header."""
        if not member.isreg() or member.issparse():
            what = "sparse" if member.issparse() else f"a link to {member.linkname}" if member.linkname else "no file"
            raise ValueError(
                f"A sample of {self.path} cannot be read. Expected files with their content (tar --dereference "
                f"--hard-dereference, without --sparse). Received: {member.name}, which is {what}"
            )

    def _check_fields(self, fields: Sequence[str]) -> None:
        """Raise ValueError unless each sample has them."""
        sample_of = np.repeat(np.arange(len(self)), np.diff(self._starts))
        for field in fields:
            kind = self._extensions.index(field) if field in self._extensions else -1
            has = np.zeros(len(self), bool)
            has[sample_of[self._members[:, 2] == kind]] = True
            if not has.all():
                number = int(np.argmin(has))
                kinds = self._members[self._starts[number] : self._starts[number + 1], 2]
                raise ValueError(
                    f"Sample {number} of {self.path} has no {field!r}. Expected {list(fields)}. "
                    f"Received: {sorted(self._extensions[kind] for kind in kinds)}"
                )

    def _check_end(self, offset: int) -> None:
        """Raise ValueError unless the archive ends where tarfile stopped: it takes a damaged header for the end.

        So it takes the end of a file, where one was cut off between two members.
        """
        rest = bytearray(min(tarfile.BLOCKSIZE, self._file.source.size - offset))
        self._file.read_at(offset, memoryview(rest))
        if not rest:
            raise ValueError(
                f"{self.path} is cut off. Expected an empty block at the end, as tar files have. "
                f"Received: {self._file.source.size:,} bytes that end with a member"
            )
        if any(rest):
            raise ValueError(
                f"{self.path} is damaged. Expected the header of a file, or the end, at byte {offset}. "
                "Received: a header with another checksum"
            )


def _names(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return a member's name up to the first dot, and what follows; nothing, if it is of no sample.

    As for the library webdataset, what has no dot, or begins with one (macOS' "._a.jpg"), is of none.
    """
    folder, slash, name = member.name.rpartition("/")
    stem, _, extension = name.partition(".")
    return folder + slash + stem, extension if stem else ""
