# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk. Each is a folder with a manifest (JSON) and a file of each writing rank: whole, or not there.

It is written under another name, flushed to the disk and then renamed, so a process that is killed at any moment leaves
the checkpoint before. The manifest names the files, and each file's name holds the digest of what it holds. Nothing is
unpickled: what was put there by somebody else cannot run code.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import threading
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_hpc.keras_hooks.checkpoint import tensors

# There from a stop by a signal until the next start: a job script that sees it puts the job into the queue again.
INTERRUPTED = "interrupted"

_FORMAT = 2
_MANIFEST, _ARRAYS = "manifest.json", "arrays.npz"
_NAME = re.compile(r"step-\d+")
_PART = re.compile(r"rank(\d+)-([0-9a-f]+)\.safetensors")
_UNFINISHED, _REPLACED, _DAMAGED = ".unfinished-", ".replaced-", "damaged-"
_NOT_ZIP = (zipfile.BadZipFile, zlib.error)
_LOOK_SECONDS = 0.05  # at first; then less often


class DamagedError(Exception):
    """A checkpoint is not as it was written."""


class NewerError(Exception):
    """A checkpoint was written by a newer keras_hpc."""


class AbandonedError(Exception):
    """The other ranks have given up a checkpoint."""


def check(folder: Path, nbytes: int, keep: int) -> None:
    """Prepare a folder for checkpoints, and end what a killed process has left half done there.

    Args:
        folder: it is made where there is none.
        nbytes: about what a checkpoint will take.
        keep: how many there will be.

    Raises:
        OSError: nothing can be written there, or the disk has too little room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{_UNFINISHED}*"):
        clear(path)  # as far as it goes: a rank that has outlived its job for a moment may still write there
    _take_back(folder)
    probe = folder / f"{_UNFINISHED}probe"
    probe.mkdir()
    try:
        _write(probe / "probe", bytes(4096))
    finally:
        shutil.rmtree(probe)
    needed = nbytes * max(1, keep + 1 - len(_whole(folder)))  # the oldest goes when the newest is whole
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{keep} checkpoints, and one more while it is written, need {needed / 1e6:.1f} MB more. Expected that "
            f"much room, or a smaller `keep`. Received: {free / 1e6:.1f} MB free",
        )


def name_of_unfinished(step: int, attempt: str) -> str:
    """Return the name of the folder in which the ranks write a checkpoint, before it is whole."""
    return f"{_UNFINISHED}step-{step:09d}-{attempt}"


def write_part(unfinished: Path, rank: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a rank's part of a checkpoint. It has its name only when it is on the disk.

    Args:
        unfinished: the folder; it is made where there is none.
        rank: who writes.
        arrays: contiguous, of dtypes that `tensors` knows.

    Raises:
        OSError: the disk is full, and so on.
    """
    unfinished.mkdir(exist_ok=True)
    path = unfinished / f"rank{rank:05d}.part"
    digest = tensors.write(path, arrays)
    path.rename(unfinished / f"rank{rank:05d}-{digest}.safetensors")
    # The first rank may have waited for this part only: then the folder has another name, and that rank flushes it.
    with contextlib.suppress(FileNotFoundError):
        _flush(unfinished)


def commit(
    folder: Path, unfinished: Path, step: int, facts: str, ranks: int, keep: int, abandoned: threading.Event
) -> None:
    """Wait until all parts of a checkpoint are there, make it whole, and remove older ones.

    Args:
        folder: for which `check` was called.
        unfinished: where the parts come.
        step: number of the step after which it was taken; it names the checkpoint, and the largest is the newest.
        facts: JSON.
        ranks: so many parts will come.
        keep: so many of the newest checkpoints stay.
        abandoned: set when nobody needs it any more.

    Raises:
        OSError: the disk is full, and so on. All earlier checkpoints are as they were.
        AbandonedError: the parts have not all come.
    """
    pause = _LOOK_SECONDS
    # Listing a folder asks a file server anew, where a look at a name may be answered from memory.
    while len(parts := sorted(filter(_PART.fullmatch, os.listdir(unfinished)))) < ranks:
        if abandoned.wait(pause):
            raise AbandonedError(f"{ranks - len(parts)} of {ranks} parts have not come")
        pause = min(2 * pause, 1.0)
    body = {"facts": json.loads(facts), "parts": {name: (unfinished / name).stat().st_size for name in parts}}
    manifest = {"format": _FORMAT, "body_crc32": _crc(body), "body": body}
    _write(unfinished / _MANIFEST, json.dumps(manifest).encode())
    _flush(unfinished)
    target = folder / f"step-{step:09d}"
    _take_back(folder)
    if target.exists():  # of the same step, which stays until the new one has its name
        target.rename(folder / f"{_REPLACED}{target.name}")
    unfinished.rename(target)
    _flush(folder)
    _take_back(folder)
    for old in _whole(folder)[:-keep]:
        _remove(old)


def clear(unfinished: Path) -> None:
    """Remove what was written of a checkpoint that does not become whole."""
    shutil.rmtree(unfinished, ignore_errors=True)


class Probe:
    """Finds out whether one rank sees what the others write. A context, on that rank.

    Args:
        folder: for which `check` was called.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{_UNFINISHED}probe-{os.urandom(8).hex()}"

    def __enter__(self) -> Probe:
        self.path.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    @staticmethod
    def answer(path: Path, rank: int) -> None:
        """Write where the probing rank looks, if this rank can."""
        try:
            _write(path / str(rank), b"here")
        except OSError:
            return  # which that rank sees

    def answered(self, ranks: int) -> list[int]:
        """Return which of the ranks have. Call it when they have tried."""
        names = set(os.listdir(self.path))
        return [rank for rank in range(ranks) if str(rank) in names]


def put_aside(folder: Path) -> None:
    """Give all checkpoints of a folder another name: they are damaged, and other nodes have whole ones."""
    for path in _whole(folder):
        _put_aside(path)


def newest(folder: Path) -> tuple[Path, dict[str, Any], dict[str, np.ndarray], list[str]] | None:
    """Return the newest checkpoint that is as it was written, or None where there is none at all.

    Newer ones that are damaged are put aside, under another name.

    Returns:
        The checkpoint, its facts and arrays, and what is to be said about damaged ones.

    Raises:
        OSError: there are checkpoints, but all are damaged.
        NewerError: one is in a newer format. It stays as it is, and training must not go on from an older one, as the
            newest ones only are kept.
    """
    said: list[str] = []
    damaged: list[Path] = []
    for path in reversed(_whole(folder)):
        try:
            facts, arrays = _read(path)
        except DamagedError as error:
            said.append(f"{path} is damaged ({error}), taking the one before")
            damaged.append(path)
            continue
        for bad in damaged:
            _put_aside(bad)
        return path, facts, arrays, said
    if said:
        raise OSError(f"All checkpoints are damaged. Remove them to begin anew. Received: {'; '.join(said)}")
    return None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        manifest = json.loads(_file(path / _MANIFEST).read_bytes())
        if manifest["format"] == 1:
            return _read_first_format(path, manifest)
        if manifest["format"] > _FORMAT:
            raise NewerError(
                f"{path} was written by a newer keras_hpc. Expected format {_FORMAT} or older; or another path, which "
                f"begins anew. Received: format {manifest['format']}"
            )
        if manifest["format"] != _FORMAT:
            raise DamagedError(f"there is no format {manifest['format']}")
        body = manifest["body"]
        if manifest["body_crc32"] != _crc(body):
            raise DamagedError("the manifest is not as it was written")
        arrays: dict[str, np.ndarray] = {}
        for name, nbytes in body["parts"].items():
            found = _PART.fullmatch(name)  # no other path
            if found is None or _file(path / name).stat().st_size != nbytes:
                raise DamagedError(f"{name} does not fit the manifest")
            arrays |= tensors.read(path / name, found[2])
        return body["facts"], arrays
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error


def _file(path: Path) -> Path:
    """Return a path that is to be read, or raise: of a pipe or a device, reading may never end."""
    if not path.is_file():
        raise DamagedError(f"{path.name} is no file")
    return path


def _read_first_format(path: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read what 0.1.0 wrote until November 2026: one file of NumPy's, by the first rank."""
    facts: dict[str, Any] = manifest["facts"]
    if manifest["facts_crc32"] != _crc(facts) or manifest["array_bytes"] != _file(path / _ARRAYS).stat().st_size:
        raise DamagedError("the manifest does not fit what is there")
    with np.load(path / _ARRAYS, allow_pickle=False) as file:  # which compares the check sum of each array
        return facts, {name: file[name] for name in file.files}


def _whole(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: int(p.name[5:]))


def _remove(path: Path) -> None:
    """Remove a checkpoint. Half removed, it must not look like one."""
    doomed = path.with_name(f"{_UNFINISHED}old-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _take_back(folder: Path) -> None:
    """Give checkpoints that were to be replaced their names again; remove those that were replaced."""
    for path in folder.glob(f"{_REPLACED}*"):
        target = path.with_name(path.name.removeprefix(_REPLACED))
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(target)


def _put_aside(path: Path) -> None:
    aside = path.with_name(f"{_DAMAGED}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _crc(facts: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
