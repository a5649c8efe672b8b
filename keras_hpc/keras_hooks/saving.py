# SPDX-License-Identifier: Apache-2.0
"""Saving: a model that all ranks save to one path is written once and whole, and no rank goes on before it is there.

`model.save` is not collective: one rank may save alone. So ranks do not ask each other but the folder: the first that
comes to write makes a mark there, writes beside the file and puts the whole file in its place; the others find the
mark and wait until it says so. A mark is for the n-th time that a rank saves to this path, with these weights. It goes
as soon as all ranks have come to a later call: scripts look into their folders for what they have saved.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import xxhash

from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.sharded import whole
from keras_hpc.keras_hooks.state import settling, variables

_DONE, _FAILED = "done", "failed: "
_POLL_SECONDS = 0.01


class Marks:
    """The marks that this rank has made.

    Args:
        job_token: the same on all ranks, and of no other job.
        timeout_seconds: how long a rank that writes may do nothing before the others give up.
    """

    def __init__(self, job_token: str, timeout_seconds: float) -> None:
        self._token = job_token
        self._timeout = timeout_seconds
        self._times: dict[str, int] = {}  # that this rank has saved to a path
        self._made: dict[str, Path] = {}

    def write_once(self, target: Path, digest: str, write: Callable[[Path], None]) -> None:
        """Lets one of the ranks that come with the same content write a file.

        Args:
            target: the file or folder.
            digest: of its content.
            write: writes it to another path beside it.

        Raises:
            OSError: another rank could not write it.
            TimeoutError: it does not get on.
        """
        path = os.path.abspath(target)
        number = self._times[path] = self._times.get(path, 0) + 1
        name = os.path.basename(path)
        mark = Path(path).with_name(f".{name}.{self._token}-{number}-{digest[:12]}")
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            self._wait(mark, path)
            return
        except FileNotFoundError:  # no such folder: Keras says so
            write(Path(path))
            return
        before, self._made[path] = self._made.get(path), mark
        if before is not None:
            before.unlink(missing_ok=True)
        temporary = Path(path).with_name(f".{os.getpid()}-{number}-{name}")
        try:
            write(temporary)
            _replace(temporary, Path(path))
        except BaseException as error:
            mark.write_text(f"{_FAILED}{type(error).__name__}: {error}")
            _remove(temporary)
            raise
        mark.write_text(_DONE)

    def _wait(self, mark: Path, path: str) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                text = mark.read_text()
            except FileNotFoundError:  # the writer has gone on to save again: then this file was there
                return
            if text == _DONE:
                return
            if text.startswith(_FAILED):
                raise OSError(f"Another rank could not save `{path}`. {text.removeprefix(_FAILED)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"Waited {self._timeout:.0f} s for another rank to save `{path}`.")
            time.sleep(_POLL_SECONDS)

    def remove(self) -> None:
        """Remove the marks. When all ranks have come to what follows."""
        while self._made:
            with contextlib.suppress(OSError):  # a script may have done anything with its folder
                self._made.popitem()[1].unlink()


def install(job: Any, patcher: Any) -> None:
    """Hooks every function of Keras that saves a model."""
    job.marks = Marks("", job.timeout_seconds)
    for name in ("save", "save_weights", "export"):
        patcher.patch(keras.Model, name, functools.partial(_saving, name))
    for module in (keras.saving, keras.models):
        for name in ("save_model", "save_weights"):
            if hasattr(module, name):
                patcher.patch(module, name, functools.partial(_saving, name))


def uninstall(job: Any) -> None:
    """Remove what this rank has left in the user's folders."""
    if job.marks is not None:
        job.marks.remove()


def begin(job: Any) -> None:
    """Give the job's marks a name that no other job has. Collective."""
    token = job.teams[0].allgather_object(secrets.token_hex(6), "keras_hpc.init()")[0] if job.size > 1 else ""
    job.marks = Marks(token, job.timeout_seconds)
    job.teams[0].after_meeting = job.marks.remove


def _saving(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if running.writing_is_off():
            return None
        if not current.active():
            return original(model, filepath, *args, **kwargs)
        with whole.gathered(model), settling.settled(model), current.unhooked():
            if current.job().size == 1 or not _is_plain(filepath, args, kwargs):
                return original(model, filepath, *args, **kwargs)
            current.job().marks.write_once(
                Path(filepath), _digest(model, name), lambda path: original(model, str(path), *args, **kwargs)
            )
            return None

    return save


def _is_plain(filepath: Any, args: Any, kwargs: Any) -> bool:
    """Whether a file can be written beside its place: not to a service, a buffer, or in several pieces."""
    if not isinstance(filepath, (str, os.PathLike)) or "://" in str(filepath) or str(filepath).endswith(".json"):
        return False
    asks = (args and args[0] is False) or kwargs.get("overwrite") is False
    return not (asks and os.path.exists(filepath))


def _digest(model: Any, name: str) -> str:
    own = set(map(id, variables.per_rank_state(model)))
    weights = [v for v in model.weights if id(v) not in own]
    return xxhash.xxh3_128_hexdigest(name.encode() + np.ascontiguousarray(variables.digests(weights)).tobytes())


def _replace(temporary: Path, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        old = path.with_name(f"{temporary.name}.old")
        path.rename(old)
        temporary.rename(path)
        _remove(old)
    else:
        os.replace(temporary, path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
