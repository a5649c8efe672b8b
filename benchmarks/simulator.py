# SPDX-License-Identifier: Apache-2.0
"""The engine's own plans, schedules and messages on simulated nodes: native/simulator under SimGrid's `smpirun`."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "native" / "simulator"
_PAGE = """\
<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
<cluster id="nodes" prefix="n" radical="0-{last}" suffix="" speed="1Gf" bw="{gb_per_s}GBps" lat="{latency_us}us"
 sharing_policy="SPLITDUPLEX" loopback_bw="20GBps" loopback_lat="0.1us"{topology}/>
</platform>
"""
# SimGrid's defaults are fitted to an Ethernet of its authors. Here a link gives what the platform says, and each call
# of MPI that sends or receives takes {overhead} s of the processor. Messages below 64 KiB are sent eagerly.
_SETTINGS = """\
smpi/simulate-computation:no smpi/test:0 smpi/iprobe:0 network/crosstraffic:0 network/TCP-gamma:0 smpi/bw-factor:0:1
smpi/lat-factor:0:1 smpi/os:0:{overhead}:0 smpi/ois:0:{overhead}:0 smpi/or:0:{overhead}:0
smpi/send-is-detached-thresh:65536 contexts/stack-size:256
"""


class SimulatorError(RuntimeError):
    """The simulator cannot be built or did not run; the message says why."""


@dataclasses.dataclass(frozen=True)
class Platform:
    """Simulated nodes and links.

    Attributes:
        description: what it stands for.
        nodes: it has; a job takes the first of them.
        gb_per_s: of a link, GB/s each way.
        latency_us: of a link, microseconds.
        topology: attributes of SimGrid's `cluster`; empty: all nodes at one ideal switch.
    """

    description: str
    nodes: int
    gb_per_s: float
    latency_us: float
    topology: str = ""

    def xml(self) -> str:
        """Returns it as SimGrid reads it."""
        topology = f" {self.topology}" if self.topology else ""
        return _PAGE.format(last=self.nodes - 1, gb_per_s=self.gb_per_s, latency_us=self.latency_us, topology=topology)


def _fat_tree(description: str, gb_per_s: float) -> Platform:
    return Platform(description, 1024, gb_per_s, 0.2, 'topology="FAT_TREE" topo_parameters="2;32,32;1,32;1,1"')


PLATFORMS: Mapping[str, Platform] = {
    # Groups of 6 chassis of 16 routers of 4 nodes; 1 link between routers of a chassis, 3 between chassis.
    "aries": Platform(
        "Cray Aries dragonfly, 4 groups of 384 nodes",
        1536,
        5.25,
        0.25,
        'topology="DRAGONFLY" topo_parameters="4,120;6,3;16,1;4"',
    ),
    "edr": _fat_tree("InfiniBand EDR, fat tree of two levels, non-blocking", 12.5),
    "hdr": _fat_tree("InfiniBand HDR, fat tree of two levels, non-blocking", 25.0),
    "switch": Platform("one ideal switch", 4096, 10.0, 0.6),
}


def missing() -> str | None:
    """Returns what the simulator needs and this machine lacks, or None."""
    if shutil.which("smpirun") is None:
        return "SimGrid is not installed (Debian: apt-get install libsimgrid-dev)"
    if _cmake() is None:
        return "cmake is not installed (pip install cmake)"
    return None


def _cmake() -> str | None:
    """That of this environment, which may not be active."""
    return shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def build(folder: Path) -> Path:
    """Compiles the simulator in `folder`, as far as it is not up to date, and returns it."""
    if reason := missing():
        raise SimulatorError(reason)
    for command in (["-S", str(SOURCE), "-B", str(folder)], ["--build", str(folder), "--parallel", "2"]):
        _run([str(_cmake()), *command], 900)
    return folder / "libkeras_hpc_simulator.so"


def simulate(
    program: Path,
    platform: Platform,
    nodes: int,
    folder: Path,
    options: Sequence[object] = (),
    overhead_us: float = 0.4,
    library: str | None = None,
    seconds: float = 600,
) -> dict[str, Any]:
    """Runs the simulator on the first nodes of a platform; returns what it printed.

    Args:
        program: of `build`.
        platform: simulated.
        nodes: of the job, one rank on each.
        folder: for the files that SimGrid reads.
        options: of native/simulator/main.cpp.
        overhead_us: that a call of MPI takes the processor.
        library: whose choice of algorithms `MPI_Allreduce` makes: `ompi`, `mpich` or `mvapich2`.
        seconds: after which the simulator is stopped.

    Raises:
        SimulatorError: it failed, or took longer.
    """
    if not 2 <= nodes <= platform.nodes:
        raise SimulatorError(f"Expected 2 to {platform.nodes} nodes on this platform. Received: {nodes}")
    xml, hosts = folder / "platform.xml", folder / "hosts"
    xml.write_text(platform.xml())
    hosts.write_text("".join(f"n{node}\n" for node in range(nodes)))
    settings = [f"--cfg={setting}" for setting in _SETTINGS.format(overhead=overhead_us / 1e6).split()]
    if library is not None:
        settings.append(f"--cfg=smpi/coll-selector:{library}")
    place = ["-np", str(nodes), "-platform", str(xml), "-hostfile", str(hosts)]
    command = ["smpirun", "-no-privatize", *place, *settings, "--log=root.thres:critical", str(program.resolve())]
    done = _run([*command, *map(str, options)], seconds)
    try:
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise SimulatorError(f"The simulator said no result. Received: {(done.stdout + done.stderr)[-2000:]}") from None
    return result


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SimulatorError(f"{command[0]} took longer than {seconds:g} s.") from None
    if done.returncode != 0:
        raise SimulatorError(f"{command[0]} ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done
