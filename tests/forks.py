"""Python that has imported a framework already: ranks are forks of one server per backend; see tests/forking.

All workers of a test run share the servers, which end with the last worker.
"""

import fcntl
import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_CODE = Path(__file__).parent / "forking"
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))[:8]  # an address has about 100 characters
_FOLDER = Path(tempfile.gettempdir()) / f"keras_hpc-tests-{_RUN}"
_KEPT: list[socket.socket] = []  # while one is open, its server lives
_STARTS_IN = 120.0  # seconds, at most


@functools.cache
def python(backend: str) -> list[str]:
    """Returns the beginning of a command that does what `python` does, if it can as a fork of the backend's server."""
    _start(backend)
    return [sys.executable, "-IS", str(_CODE / "rank.py"), str(_FOLDER)]


@functools.cache
def folder_with_python(backend: str) -> str:
    """Returns a folder for PATH in which `python` is such a command."""
    command = " ".join(python(backend))
    folder = _FOLDER / f"bin-{backend}"
    folder.mkdir(exist_ok=True)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    return str(folder)


def _start(backend: str) -> None:
    from launch import child_environment

    _FOLDER.mkdir(mode=0o700, exist_ok=True)
    address = str(_FOLDER / backend)
    lock = os.open(_FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if connection.connect_ex(address) != 0:
            with (_FOLDER / f"{backend}.log").open("w") as log:
                server = subprocess.Popen(
                    [sys.executable, str(_CODE / "server.py"), address],
                    env=child_environment(backend, lean=True),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            deadline = time.monotonic() + _STARTS_IN
            while connection.connect_ex(address) != 0:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no server of ranks: {(_FOLDER / f'{backend}.log').read_text()}")
                time.sleep(0.05)
        _KEPT.append(connection)
    finally:
        os.close(lock)


def groups_of(token: str) -> list[str]:
    """Returns the process groups of a job's forked ranks: what a rank starts is in its group."""
    known = _FOLDER / f"ranks-of-{token}"
    return known.read_text().split() if known.exists() else []


def forget(token: str) -> None:
    """Forgets a job that has ended."""
    (_FOLDER / f"ranks-of-{token}").unlink(missing_ok=True)
