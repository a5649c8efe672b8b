"""Runs a command in a real Slurm of several hosts, all made for it on this machine and gone with it.

python tests/cluster/with_slurm.py [--mpi-default none] HOSTS COMMAND...    such as: 4 srun -N4 hostname

Each host has its own name, network, /dev/shm and slurmd (`benchmarks.hosts`); slurmctld and the command run beside
them. Everything is in namespaces: no route leads out, nothing else on this machine notices, and all daemons end with
the command. Needs Slurm, munge and iproute2, and the right to make namespaces, as root or as an ordinary user.

Exits with the status of the command, or with 77 and a reason where this machine cannot do it.
"""

import argparse
import getpass
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.hosts import Hosts, HostsError

CANNOT = 77
_INSIDE = "KERAS_HPC_TEST_INSIDE"
_DAEMONS = ("munged", "slurmctld", "slurmd")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=head
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
TmpFS={folder}/tmp.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault={mpi_default}
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_START_SECONDS = 30


class CannotError(RuntimeError):
    """This machine cannot run a Slurm of several hosts."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a command in a Slurm of several hosts made for it.")
    parser.add_argument("--mpi-default", default="none", help="what srun does without --mpi")
    parser.add_argument("hosts", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if _INSIDE not in os.environ:
        return _in_namespaces()
    folder = Path(os.environ.pop(_INSIDE))
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        with Hosts(arguments.hosts) as hosts:
            environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")} | hosts.environment
            _start(hosts, folder, arguments.mpi_default, environment)
            return subprocess.call(hosts.on_head(arguments.command), env=environment)
    except (CannotError, HostsError) as why:
        sys.stderr.write(f"{why}\n")
        return CANNOT


def _in_namespaces() -> int:
    """Runs this very command as the first process of namespaces, with which all others end."""
    missing = [tool for tool in (*_DAEMONS, "srun", "ip", "unshare", "setpriv") if shutil.which(tool) is None]
    if missing:
        sys.stderr.write(f"A Slurm of several hosts needs {', '.join(missing)}: install slurm-wlm, munge, iproute2.\n")
        return CANNOT
    own = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:  # not as a mapped root: slurmd would want to change groups, which is not allowed
        own = ["--user", "--map-current-user", "--keep-caps", *own]
    if (tried := subprocess.run(["unshare", *own, "true"], capture_output=True, text=True, check=False)).returncode:
        sys.stderr.write(f"This machine does not let us make namespaces: {tried.stderr.strip()}\n")
        return CANNOT
    with tempfile.TemporaryDirectory(prefix="keras_hpc-slurm-") as folder:
        os.chmod(folder, 0o755)  # munged refuses a socket that others cannot reach
        # If this process is killed, unshare is, and with it all that is inside.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *own, sys.executable, __file__, *sys.argv[1:]]
        # Hosts' own folder too: nobody is left to remove it where a time limit ends the namespaces.
        return subprocess.call(command, env=os.environ | {_INSIDE: folder, "TMPDIR": folder})


def _start(hosts: Hosts, folder: Path, mpi_default: str, environment: dict[str, str]) -> None:
    for name in ("state", *(f"{kind}.{host}" for kind in ("spool", "tmp") for host in hosts.names)):
        (folder / name).mkdir()
    nodes = f"host[1-{len(hosts.names)}]"
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(user=getpass.getuser(), folder=folder, nodes=nodes, mpi_default=mpi_default)
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # else slurmd looks for one that may not be mounted
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    _daemon(
        [
            "munged",
            "--foreground",
            "--force",
            *(f"--{option}={folder}/munge.{name}" for option, name in places.items()),
        ],
        folder / "munged.txt",
        environment,
    )
    _until((folder / "munge.socket").exists, folder)
    _daemon(hosts.on_head(["slurmctld", "-D"]), folder / "slurmctld.txt", environment)
    for host in hosts.names:
        _daemon([hosts.agent, host, "exec slurmd -D"], folder / f"slurmd.{host}.txt", environment)
    idle = hosts.on_head(["sinfo", "--noheader", "--states=idle", "--format=%D"])

    def all_idle() -> bool:
        done = subprocess.run(idle, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip() == str(len(hosts.names))

    _until(all_idle, folder)


def _until(ready: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in sorted(folder.glob("*.txt")))
            raise CannotError(f"Slurm did not start in {_START_SECONDS} s.\n{logs}")
        time.sleep(0.1)


def _daemon(command: list[str], log: Path, environment: dict[str, str]) -> None:
    with log.open("w") as file:
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


if __name__ == "__main__":
    sys.exit(main())
