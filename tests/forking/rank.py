"""Does as a fork of its backend's server what `python ARGUMENTS` does: `python -IS rank.py FOLDER ARGUMENTS`.

Where there is no server, or it has imported something else than this rank would, it becomes `python ARGUMENTS`.
A signal goes on to the fork, and this process ends as the fork does.
"""

import json
import os
import signal
import socket
import sys

folder, *arguments = sys.argv[1:]
environment = dict(os.environ)
FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGQUIT,
    signal.SIGCONT,
)


def as_plain_python():
    os.execv(sys.executable, [sys.executable, *arguments])


def open_files(other_than):
    """The numbers of this process's files that a new program would have, too."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number != other_than and os.get_inheritable(number):
                found.append(number)
        except OSError:  # the list's own
            continue
    return found


if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
    as_plain_python()
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    server.connect(f"{folder}/{environment.get('KERAS_BACKEND')}")
except OSError:
    as_plain_python()
signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
files = open_files(server.fileno())
request = {
    "arguments": arguments,
    "environment": environment,
    "folder": os.getcwd(),
    "files": files,
    "cores": sorted(os.sched_getaffinity(0)),
    "list": f"{folder}/ranks-of-{environment['KERAS_HPC_TEST_TOKEN']}",
}
socket.send_fds(server, [json.dumps(request).encode()], files)
process = int(server.recv(64))
if process == 0:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    as_plain_python()


def forward(number, frame):
    try:
        os.kill(process, number)
    except ProcessLookupError:  # it has just ended
        pass


for number in FORWARDED:
    signal.signal(number, forward)
signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
ended = server.recv(64)
if not ended:
    sys.exit("The server that this rank was forked from is gone.")
status = int(ended)
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
