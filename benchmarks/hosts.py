# SPDX-License-Identifier: Apache-2.0
"""Throw-away hosts on this machine: to measure, and to test, what happens between nodes.

Each host is a set of Linux namespaces, with a name, a network and a /dev/shm of its own and its share of the cores. A
switch in one more namespace joins them, and nothing else: the machine's own network is not touched. All of it vanishes
with the process that made it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

_TOOLS = ("ip", "tc", "unshare", "nsenter", "taskset")
_HEAD = "head"  # where mpiexec runs
_BURST = "256kb"

# Starts a command on a host as ssh would. Lasts as long as its stdin: a host ends with the process that made it.
_AGENT = """#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
        -o|-l|-p|-i) shift 2;;
        -*) shift;;
        *) break;;
    esac
done
host=$1
shift
[ -s {folder}/$host ] || {{ echo "no host $host" >&2; exit 255; }}
read -r pid cores < {folder}/$host
exec nsenter -t $pid --net --uts --ipc --mount --wd="$PWD" taskset -c $cores sh -c "$*"
"""


def _may_make_namespaces() -> bool:
    """CAP_NET_ADMIN and CAP_SYS_ADMIN: root has them, and so has anyone in a user namespace of their own."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    return all(effective >> bit & 1 for bit in (12, 21))


class HostsError(RuntimeError):
    """This machine cannot make hosts; the message says what is missing."""


class Hosts:
    """Hosts `host1`, `host2`, ... as a context manager.

    Args:
        count: how many.
        mbit: bandwidth of each host's link, each way, in Mbit/s. None: as fast as the machine can.

    Raises:
        HostsError: no right to make namespaces, or a tool is missing.
    """

    def __init__(self, count: int, mbit: int | None = None) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise HostsError(f"Hosts need {', '.join(missing)}: install iproute2 and util-linux.")
        if not _may_make_namespaces():
            raise HostsError(
                "Hosts need the right to make namespaces: run as root, or under `unshare --user --map-root-user`."
            )
        self.names = [f"host{i + 1}" for i in range(count)]
        self._mbit = mbit
        self._keepers: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Hosts:
        self._folder = Path(tempfile.mkdtemp(prefix="keras_hpc-hosts-"))
        try:
            self._make()
        except BaseException:  # also an interruption must leave no host behind; raised again
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def agent(self) -> str:
        """A command that stands in for ssh: `AGENT HOST COMMAND...`."""
        return str(self._folder / "agent")

    @property
    def environment(self) -> dict[str, str]:
        """What makes the mpiexec of MPICH, Intel MPI and Open MPI (5, and before) use it."""
        hydra = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": self.agent}
        intel = {"I_MPI_HYDRA_BOOTSTRAP": "ssh", "I_MPI_HYDRA_BOOTSTRAP_EXEC": self.agent}
        return hydra | intel | {"PRTE_MCA_plm_ssh_agent": self.agent, "OMPI_MCA_plm_rsh_agent": self.agent}

    def on_head(self, command: list[str]) -> list[str]:
        """Returns the command as it runs beside the hosts, where a launcher can reach them."""
        return [self.agent, _HEAD, f"exec {shlex.join(command)}"]  # so that a signal reaches it

    def limit(self, name: str, mbit: int) -> None:
        """Gives a host's link another bandwidth, each way, in Mbit/s."""
        limit = f"root tbf rate {mbit}mbit burst {_BURST} latency 50ms"
        self._run(name, f"tc qdisc replace dev eth0 {limit}")
        self._run("switch", f"tc qdisc replace dev {name} {limit}")

    def _make(self) -> None:
        addresses = {name: f"10.77.0.{i + 1}" for i, name in enumerate([*self.names, _HEAD])}
        table = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
        agent = Path(self.agent)
        agent.write_text(_AGENT.format(folder=shlex.quote(str(self._folder))))
        agent.chmod(0o755)
        every = sorted(os.sched_getaffinity(0))
        share = max(1, len(every) // len(self.names))
        self._keep("switch", every)
        self._run("switch", "ip link add br0 type bridge forward_delay 0", "ip link set br0 up")
        for i, (name, address) in enumerate(addresses.items()):
            first = i * share % len(every)
            self._keep(name, every if name == _HEAD else every[first : first + share])
            pid = self._keepers[name].pid
            self._run("switch", f"ip link add {name} type veth peer name eth0 netns {pid}")
            self._run("switch", f"ip link set {name} master br0 up")
            self._run(name, f"ip addr add {address}/24 dev eth0", "ip link set eth0 up")
            if self._mbit is not None and name != _HEAD:
                self.limit(name, self._mbit)

    def _keep(self, name: str, cores: list[int]) -> None:
        setup = [
            f"hostname {name}",
            "ip link set lo up",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
            "mount -t sysfs sysfs /sys",
            f"mount --bind {shlex.quote(str(self._folder / 'hosts'))} /etc/hosts",
            "echo ready",
            "exec cat",
        ]
        own = ["--net", "--uts", "--ipc", "--mount", "--propagation", "private"]
        keeper = subprocess.Popen(
            ["unshare", *own, "sh", "-ec", "\n".join(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self._keepers[name] = keeper
        if not keeper.stdout or keeper.stdout.readline().strip() != "ready":
            raise HostsError(f"This machine does not let us make a host: {keeper.communicate()[1].strip()}")
        (self._folder / name).write_text(f"{keeper.pid} {','.join(map(str, cores))}\n")

    def _run(self, host: str, *commands: str) -> None:
        done = subprocess.run([self.agent, host, " && ".join(commands)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise HostsError(f"Could not set up the network of {host}: {done.stderr.strip()}")

    def _remove(self) -> None:
        for keeper in self._keepers.values():
            keeper.kill()
        for keeper in self._keepers.values():
            keeper.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)
