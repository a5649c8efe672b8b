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

from keras_hpc.tools.timeline import Timeline

SOURCE = Path(__file__).resolve().parents[2] / "native" / "simulator"
_CLUSTER = """\
<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
<cluster id="nodes" prefix="n" radical="0-{last}" suffix="" speed="1Gf" bw="{gb_per_s}GBps" lat="{latency_us}us"
 sharing_policy="SPLITDUPLEX" loopback_bw="20GBps" loopback_lat="0.1us"{topology}/>
</platform>
"""
# SimGrid's defaults are fitted to an Ethernet of its authors. Here a link gives what the platform says, and each call
# of MPI that sends or receives takes {overhead} s of the processor. Messages below 64 KiB are sent eagerly. What ends
# within 10 ns ends together.
_SETTINGS = """\
smpi/simulate-computation:no smpi/test:0 smpi/iprobe:0 network/crosstraffic:0 network/TCP-gamma:0 smpi/bw-factor:0:1
smpi/lat-factor:0:1 smpi/os:0:{overhead}:0 smpi/ois:0:{overhead}:0 smpi/or:0:{overhead}:0
smpi/send-is-detached-thresh:65536 contexts/stack-size:256 surf/precision:1e-8
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
        file: a description of a platform in SimGrid's language, instead of the three above; its hosts are the nodes.
    """

    description: str
    nodes: int
    gb_per_s: float
    latency_us: float
    topology: str = ""
    file: str = ""

    def xml(self) -> str:
        """Return it as SimGrid reads it."""
        if self.file:
            return Path(self.file).read_text()
        topology = f" {self.topology}" if self.topology else ""
        return _CLUSTER.format(
            last=self.nodes - 1, gb_per_s=self.gb_per_s, latency_us=self.latency_us, topology=topology
        )


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
    "edr-4096": Platform(
        "InfiniBand EDR, fat tree of three levels, non-blocking",
        4096,
        12.5,
        0.2,
        'topology="FAT_TREE" topo_parameters="3;16,16,16;1,16,16;1,1,1"',
    ),
    "hdr": _fat_tree("InfiniBand HDR, fat tree of two levels, non-blocking", 25.0),
    "switch": Platform("one ideal switch", 4096, 10.0, 0.6),
}


def platform_of(name: str) -> Platform:
    """Return a platform by its name, or that of an XML file.

    Raises:
        SimulatorError: there is none.
    """
    if name in PLATFORMS:
        return PLATFORMS[name]
    if not name.endswith(".xml") or not Path(name).is_file():
        raise SimulatorError(f"Expected {', '.join(PLATFORMS)} or an XML file of SimGrid's. Received: {name}")
    return Platform(name, 0, 0, 0, file=name)


def missing() -> str | None:
    """Return what the simulator needs and this machine lacks, or None."""
    if shutil.which("smpirun") is None:
        return "SimGrid is not installed (Debian: apt-get install libsimgrid-dev)"
    if _cmake() is None:
        return "cmake is not installed (pip install cmake)"
    if not SOURCE.is_dir():
        return "the simulator is built from the sources of keras_hpc, which are not beside the package: use a checkout"
    return None


def version() -> str:
    """Return SimGrid's, as its command says it."""
    return _run(["smpirun", "-version"], 30).stdout.split("\n")[0]


def _cmake() -> str | None:
    """That of this environment, which may not be active."""
    return shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def cache() -> Path:
    """Return where the user's simulator is built."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keras_hpc" / "simulator"


def build(folder: Path) -> Path:
    """Compile the simulator in `folder`, as far as it is not up to date, and return it."""
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
    """Run the simulator on the first nodes of a platform; return what it printed.

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
    if nodes < 2 or (not platform.file and nodes > platform.nodes):
        most = "" if platform.file else f" to {platform.nodes}"
        raise SimulatorError(f"Expected 2{most} nodes on this platform. Received: {nodes}")
    xml, hosts = folder / "platform.xml", folder / "hosts"
    xml.write_text(platform.xml())
    hosts.write_text("".join(f"n{node}\n" for node in range(nodes)))
    settings = [f"--cfg={setting}" for setting in _SETTINGS.format(overhead=overhead_us / 1e6).split()]
    if library is not None:
        settings.append(f"--cfg=smpi/coll-selector:{library}")
    place = ["-np", str(nodes), "-platform", str(xml), *([] if platform.file else ["-hostfile", str(hosts)])]
    command = ["smpirun", "-no-privatize", *place, *settings, "--log=root.thres:critical", str(program.resolve())]
    done = _run([*command, "--overhead-s", str(overhead_us / 1e6), *map(str, options)], seconds)
    try:
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise SimulatorError(f"The simulator said no result. Received: {(done.stdout + done.stderr)[-2000:]}") from None
    return result


def simulate_steps(
    program: Path,
    platform: Platform,
    nodes: int,
    folder: Path,
    timeline: Timeline,
    options: Sequence[object] = (),
    variation: Sequence[float] = (),
    steps: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Run training steps of a timeline; see `simulate`.

    Args:
        program: of `build`.
        platform: simulated.
        nodes: of the job, one rank on each.
        folder: for files.
        timeline: when each gradient is there.
        options: of native/simulator/main.cpp.
        variation: how long steps take against their mean, of which each node draws some at random; empty: all alike.
        steps: of which the mean counts. Without noise one is like another.
        **settings: of `simulate`.

    Returns:
        a dictionary: `step_ms`; `exposed_ms`, that the node waited most which waited most; `efficiency`, against a node
        alone; `buckets`, in which gradients travel.
    """
    tensors, steps_of_node = folder / "tensors", folder / "variation"
    rows = zip(timeline.elements, timeline.ready, strict=True)
    tensors.write_text("".join(f"{elements} {ready:.9f}\n" for elements, ready in rows))
    steps_of_node.write_text("".join(f"{share:.6f}\n" for share in variation))
    step = ["--compute-s", timeline.compute_s, "--update-s", timeline.update_s, "--repeats", steps]
    drawn = ["--variation", steps_of_node] if len(variation) > 1 else []
    return simulate(program, platform, nodes, folder, ["--tensors", tensors, *step, *drawn, *options], **settings)


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
