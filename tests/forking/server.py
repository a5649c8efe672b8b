"""A process that has imported a framework and Keras, and becomes any number of ranks by forking: `server.py SOCKET`.

Importing them takes 4 to 10 seconds of a core, in every rank of every launch; a fork takes milliseconds. A rank has its
client's environment, arguments, folder, files and cores, and no thread yet; keras_hpc and MPI it imports itself. What
frameworks read as they are imported must be the server's: other ranks it leaves to plain Python.

A connection is a client's (see rank.py), or one that keeps the server alive. It ends when there is none any more.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import types
import warnings
from pathlib import Path

# What is read while Keras and a framework are imported. Of other variables a rank has what its client has.
AT_IMPORT = ("GLIBC_", "HOME", "JAX_", "KERAS_", "LD_", "MALLOC_", "OMP_", "PYTHON", "TF_", "TORCH_", "XLA_")
OURS = "KERAS_HPC_"
_LONGEST = 1 << 20  # bytes of a request
_MOST_FILES = 250
_ABOVE = 400  # where no rank has a file yet
_ENVIRONMENT = dict(os.environ)


def _at_import(environment):
    return {
        name: value for name, value in environment.items() if name.startswith(AT_IMPORT) and not name.startswith(OURS)
    }


class Server:
    """Waits for requests, and for the ranks that it has made to end."""

    def __init__(self, address):
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._own_files = [self._woken, wake]
        self._environment = _at_import(_ENVIRONMENT)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(address)
        self._listening.listen(64)
        self._open = set()
        self._client_of = {}  # rank's process: its connection

    def serve(self):
        """Returns in each rank, with what it is asked to be; in the server, None at its end."""
        while True:
            ready, _, _ = select.select([self._woken, self._listening, *self._open], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._tell_of_ended()
            if self._listening in ready:
                self._open.add(self._listening.accept()[0])
            for connection in self._open.intersection(ready):
                request = self._answer(connection)
                if request is not None:
                    return request
            if self._listening not in ready and not self._open:
                return None

    def _answer(self, connection):
        try:
            text, files, _, _ = socket.recv_fds(connection, _LONGEST, _MOST_FILES)
        except ConnectionResetError:  # it was ended before it read an answer
            text, files = b"", []
        if not text:  # who is gone needs no rank any more: mpiexec has ended its client
            for process, client in self._client_of.items():
                if client is connection:
                    with contextlib.suppress(ProcessLookupError):  # it may not have a group of its own yet
                        os.killpg(process, signal.SIGKILL)  # as mpiexec does: a child of it may hold the output
                    os.kill(process, signal.SIGKILL)
            self._open.remove(connection)
            connection.close()
            return None
        request = json.loads(text)
        if _at_import(request["environment"]) != self._environment:
            _tell(connection, 0)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # JAX warns of forks, because it usually has threads
                process = os.fork()
            if process == 0:
                self._leave()
                _become(request, files)
                return request
            self._client_of[process] = connection
            _tell(connection, process)
        for file in files:
            os.close(file)
        return None

    def _tell_of_ended(self):
        while self._client_of:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            client = self._client_of.pop(process)
            if client in self._open:
                _tell(client, os.waitstatus_to_exitcode(status))

    def _leave(self):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in (self._listening, *self._open):
            connection.close()
        for file in self._own_files:
            os.close(file)


def _tell(connection, number):
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its client has been ended meanwhile
        connection.sendall(str(number).encode())


def _become(request, files):
    """Makes this process what its client would be."""
    os.setpgid(0, 0)  # what it leaves behind is known by it
    with open(request["list"], "a") as known:
        known.write(f"{os.getpid()}\n")
    above = [os.dup2(file, _ABOVE + i, inheritable=False) for i, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(above, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    sys.orig_argv = [sys.executable, *sys.argv]
    hidden = importlib.import_module("sitecustomize").hidden
    for name in set(hidden(_ENVIRONMENT)) - set(hidden(os.environ)):
        del sys.modules[name]
    for seed in filter(None, (sys.modules.get("random"), getattr(sys.modules.get("numpy"), "random", None))):
        seed.seed()


def _run(arguments):
    """As Python does it: `-m module`, `-c code` or a script, and their arguments."""
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(arguments[1])
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), vars(main))
    else:
        main.__file__ = arguments[0]
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec", dont_inherit=True), vars(main))


def _remove(address):
    for path in (address, address.with_suffix(".log")):
        path.unlink()
    shutil.rmtree(address.with_name(f"bin-{address.name}"), ignore_errors=True)
    with contextlib.suppress(OSError):  # another server's files are there still
        address.parent.rmdir()


if __name__ == "__main__":
    address = sys.argv[1]
    sys.path.pop(0)  # this folder
    importlib.import_module("keras")
    gc.collect()
    gc.freeze()  # no rank copies pages only to look for garbage in them
    request = Server(address).serve()
    if request is not None:
        _run(request["arguments"])
    else:
        _remove(Path(address))
