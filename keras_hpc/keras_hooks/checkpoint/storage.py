# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk. Each is a folder with a manifest (JSON) and arrays (.npz): whole, or not there.

It is written under another name, flushed to the disk and then renamed, so a process that is killed at any moment leaves
the checkpoint before. Nothing is unpickled: what was put there by somebody else cannot run code.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# There from a stop by a signal until the next start: a job script that sees it puts the job into the queue again.
INTERRUPTED = "interrupted"

_FORMAT = 1
_MANIFEST, _ARRAYS = "manifest.json", "arrays.npz"
_NAME = re.compile(r"step-\d+")
_UNFINISHED, _DAMAGED = ".unfinished-", "damaged-"


class DamagedError(Exception):
    """A checkpoint is not as it was written."""


def check(folder: Path, nbytes: int, keep: int) -> None:
    """Prepare a folder for checkpoints, and remove what a killed process has left half written there.

    Args:
        folder: it is made where there is none.
        nbytes: about what a checkpoint will take.
        keep: how many there will be.

    Raises:
        OSError: nothing can be written there, or the disk has too little room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path)
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


def write(folder: Path, step: int, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], keep: int) -> Path:
    """Write a checkpoint and remove older ones.

    Args:
        folder: for which `check` was called.
        step: number of the step after which it was taken; it names the checkpoint, and the largest is the newest.
        facts: what JSON can hold.
        arrays: of dtypes of NumPy's own, no objects.
        keep: so many of the newest stay.

    Returns:
        The new checkpoint.

    Raises:
        OSError: the disk is full, and so on. All earlier checkpoints are as they were.
    """
    target = folder / f"step-{step:09d}"
    unfinished = folder / f"{_UNFINISHED}{target.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        with (unfinished / _ARRAYS).open("xb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        manifest = {
            "format": _FORMAT,
            "array_bytes": (unfinished / _ARRAYS).stat().st_size,
            "facts_crc32": _crc(facts),
            "facts": facts,
        }
        _write(unfinished / _MANIFEST, json.dumps(manifest).encode())
        _flush(unfinished)
        if target.exists():
            _remove(target)
        unfinished.rename(target)
        _flush(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in _whole(folder)[:-keep]:
        _remove(old)
    return target


def newest(folder: Path) -> tuple[Path, dict[str, Any], dict[str, np.ndarray], list[str]] | None:
    """Return the newest checkpoint that is as it was written, or None where there is none at all.

    Newer ones that are damaged are put aside, under another name.

    Returns:
        The checkpoint, its facts and arrays, and what is to be said about damaged ones.

    Raises:
        OSError: there are checkpoints, but all are damaged.
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
            aside = folder / f"{_DAMAGED}{bad.name}"
            shutil.rmtree(aside, ignore_errors=True)
            bad.rename(aside)
        return path, facts, arrays, said
    if said:
        raise OSError(f"All checkpoints are damaged. Remove them to begin anew. Received: {'; '.join(said)}")
    return None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        if manifest["format"] != _FORMAT:
            raise DamagedError(f"expected format {_FORMAT}, found {manifest['format']}")
        facts: dict[str, Any] = manifest["facts"]
        if manifest["facts_crc32"] != _crc(facts) or manifest["array_bytes"] != (path / _ARRAYS).stat().st_size:
            raise DamagedError("the manifest does not fit what is there")
        with np.load(path / _ARRAYS, allow_pickle=False) as file:  # which compares the check sum of each array
            return facts, {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error


def _whole(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: int(p.name[5:]))


def _remove(path: Path) -> None:
    """Remove a checkpoint. Half removed, it must not look like one."""
    doomed = path.with_name(f"{_UNFINISHED}old-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


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
