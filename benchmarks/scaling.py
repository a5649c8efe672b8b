# SPDX-License-Identifier: Apache-2.0
"""Training steps on 2 to 4,096 simulated nodes. Nothing here is measured but the timelines."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from keras_hpc.tools import simulator
from keras_hpc.tools.timeline import Timeline

TIMELINES = Path(__file__).resolve().parents[1] / "docs" / "performance" / "timelines"
MODELS = {"resnet50": "ResNet50", "inceptionv3": "Inception v3"}
MIB = 1 << 20
_LONGEST_SECONDS = 7200  # of one simulation, on a machine with something else to do
_ALGORITHMS = {"keras_hpc": "usual", "MPI": "mpi"}
LANES = 4  # of a node
# What the simulator takes for granted, beside the engine's code and the platforms of keras_hpc/tools/simulator.py.
ASSUMPTIONS = {
    "a node": f"one rank and {LANES} communication threads, as many as the engine takes of 32 cores or more, each with "
    "a core of its own",
    "a call of MPI that sends or receives": "0.4 us of its thread, which waits for no other thread",
    "adding up float32": "5 GB/s by a thread, two operands into one; several threads do not slow each other down",
    "copying": "8 GB/s",
    "rounding to 16 bits and back": "4 GB/s",
    "links": "shared max-min fairly by the flows on them; static, minimal routes; no loss, nobody else's traffic",
    "messages of up to 64 KiB": "set out before their receiver asks for them; longer ones when it has",
    "MPI_Allreduce": "SimGrid's implementation of what MVAPICH2 chooses, for MPI_SUM, one blocking call per bucket "
    "once all of it is there; besides its messages, only the least additions that an allreduce needs",
    "a step": "takes what the case says; gradients come when they came in the traced job, as a share of the step",
    "not simulated": "input, copies between GPU and host, several ranks on a node, what the communication thread takes "
    "from computing",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A point of the figure."""

    platform: str
    model: str
    step_ms: float
    nodes: int
    way: str = "keras_hpc"  # or MPI, or an algorithm of the engine's by name
    bucket_mib: int = 0  # 0: the engine's choice
    noise: str = ""  # or how steps vary: "measured", or "own", without what the traced machine's ranks have in common
    lanes: int = LANES

    @property
    def cost(self) -> float:
        """About how long it takes to simulate, to begin with the longest."""
        return self.nodes * (3 if self.platform == "aries" else 1) * (2 if self.noise else 1) * 300 / self.step_ms


def _cases(
    platforms: Iterable[str], models: Iterable[str], steps: Iterable[float], nodes: Iterable[int], **more: Any
) -> list[Case]:
    return [Case(*place, **more) for place in itertools.product(platforms, models, steps, nodes)]


_FEW = (2, 8, 32, 128)
_FIGURE = [
    *_cases(("edr",), ("resnet50",), (300,), (*_FEW, 1024)),
    *_cases(("edr",), ("inceptionv3",), (300,), _FEW),
    *_cases(("hdr",), ("resnet50",), (300,), _FEW),
    # 1,024 nodes of a dragonfly take as long to simulate as all the rest.
    *_cases(("aries",), ("resnet50",), (300,), (*_FEW, 256)),
    *_cases(("aries",), ("inceptionv3",), (300,), _FEW),
    *_cases(("edr",), ("resnet50",), (100,), (*_FEW, 1024)),
    *_cases(("aries",), ("resnet50",), (100,), _FEW),
    *_cases(("edr", "hdr"), ("resnet50",), (50,), _FEW),
    *_cases(("aries",), ("resnet50",), (50,), _FEW[:-1]),
    *_cases(("edr",), ("resnet50",), (300,), (*_FEW, 1024), noise="own"),
    *_cases(("edr",), ("resnet50",), (300,), _FEW, noise="measured"),
    *_cases(("edr",), ("inceptionv3",), (300,), _FEW, noise="own"),
    *_cases(("edr",), ("inceptionv3",), (300,), _FEW, noise="measured"),
    *_cases(("aries", "edr"), ("resnet50",), (300, 100), _FEW, way="MPI"),
]
# What the engine could choose instead.
_CHOICES = [
    *(
        case
        for lanes in (1, 2)
        for case in _cases(("aries", "edr"), ("resnet50",), (100, 50), (8, 32, 128), lanes=lanes)
        if case.platform == "edr" or case.step_ms == 100 or case.nodes < 128
    ),
    *(case for mib in (1, 2, 4, 8) for case in _cases(("edr",), ("resnet50",), (100,), (128,), bucket_mib=mib)),
    *(case for mib in (1, 4) for case in _cases(("aries",), ("resnet50",), (100,), (32,), bucket_mib=mib)),
    *(
        case
        for way in ("recursive_doubling", "rabenseifner", "ring", "pairwise", "radix_k")
        for case in _cases(("aries", "edr"), ("resnet50",), (100,), (8, 32), way=way)
    ),
]
CASES = _FIGURE + _CHOICES
# What takes longer to simulate than all of these, and 5 GB.
LARGE = [
    *_cases(("edr",), ("inceptionv3",), (300,), (1024,)),
    *_cases(("aries",), ("resnet50",), (300,), (1024,)),
    *_cases(("edr-4096",), ("resnet50",), (300, 100), (4096,)),
]


def perfect_ms(case: Case, timeline: Timeline) -> float:
    """A step of which the link carries each gradient from when it is there, and nothing else takes time."""
    step = timeline.scaled(case.step_ms / 1e3)
    bytes_per_s = simulator.PLATFORMS[case.platform].gb_per_s * 1e9
    free = 0.0
    for ready, elements in sorted(zip(step.ready, step.elements, strict=True)):
        free = max(free, ready * step.compute_s) + 8 * elements * (case.nodes - 1) / case.nodes / bytes_per_s
    return 1e3 * (max(free, step.compute_s) + step.update_s)


def run(
    program: Path, cases: Sequence[Case], timelines: dict[str, Timeline], jobs: int, show: Any = print
) -> list[dict[str, Any]]:
    """Simulates the cases, `jobs` at a time; returns a row for each, in their order."""

    def one(case: Case) -> dict[str, Any]:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = simulate(program, case, timelines[case.model], Path(folder))
        row = dataclasses.asdict(case) | {
            "step": round(found["step_ms"], 4),
            "exposed_ms": round(found["exposed_ms"], 4),
            "efficiency": round(found["efficiency"], 5),
            "perfect_ms": round(perfect_ms(case, timelines[case.model]), 4),
            "seconds": round(time.monotonic() - begin, 1),
        }
        what = f"{case.way}, {case.lanes} threads" + (f", {case.noise} noise" if case.noise else "")
        show(
            f"{case.platform} {case.model} {case.step_ms:g} ms, {case.nodes} nodes, {what}: "
            f"{row['efficiency']:.1%} simulated, in {row['seconds']} s",
            flush=True,
        )
        return row

    with ThreadPoolExecutor(jobs) as pool:
        waiting = {case: pool.submit(one, case) for case in sorted(cases, key=lambda case: -case.cost)}
        return [waiting[case].result() for case in cases]


def simulate(program: Path, case: Case, timeline: Timeline, folder: Path) -> dict[str, Any]:
    """Simulates steps of one case."""
    return simulator.simulate_steps(
        program,
        simulator.PLATFORMS[case.platform],
        case.nodes,
        folder,
        timeline.scaled(case.step_ms / 1e3),
        options=[
            *("--bucket-bytes", case.bucket_mib * MIB, "--algorithm", _ALGORITHMS.get(case.way, case.way)),
            *("--lanes", case.lanes),
        ],
        variation={"": (), "measured": timeline.variation, "own": timeline.own_variation}[case.noise],
        steps=2 if case.noise and case.nodes < 1024 else 1,
        library="mvapich2" if case.way == "MPI" else None,
        seconds=_LONGEST_SECONDS,
    )


def plot(rows: Sequence[dict[str, Any]], file: Path, note: str) -> None:
    """Draws efficiency against nodes, and below it a note: how near the simulator comes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    kinds = ("platform", "model", "step_ms", "way", "noise")
    curves: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["bucket_mib"] or row["way"] not in _ALGORITHMS or row["lanes"] != LANES:
            continue  # what could be chosen instead
        curves.setdefault(tuple(row[kind] for kind in kinds), []).append(row)
    colours = {"aries": "C0", "edr": "C1", "hdr": "C2"}
    marks = {300: "o", 100: "s", 50: "^"}
    for (platform, model, step_ms, way, noise), points in curves.items():
        style = ":" if way == "MPI" else {"": "-", "own": "--", "measured": "-."}[noise]
        side = axes[0] if step_ms == 300 and way != "MPI" else axes[1]
        label = f"{MODELS[model]}, {step_ms:g} ms, {platform}{f', {noise} noise' if noise else ''}"
        side.plot(
            [point["nodes"] for point in points],
            [100 * point["efficiency"] for point in points],
            style,
            marker=marks[step_ms],
            color=colours[platform],
            fillstyle="none" if model == "inceptionv3" else "full",
            label=label + (", MPI_Allreduce" if way == "MPI" else ""),
        )
    for side, title in zip(axes, ("steps of 300 ms", "shorter steps; and MPI_Allreduce, blocking"), strict=True):
        side.set(xscale="log", xlabel="nodes, one rank on each", title=f"Simulated: {title}")
        side.grid(alpha=0.3)
        side.legend(fontsize=7)
    axes[0].set(ylabel="efficiency, %: a step alone / simulated step", ylim=(0, 102))
    figure.supxlabel(note, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)
