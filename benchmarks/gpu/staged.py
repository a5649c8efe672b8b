# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU, without a framework: `python -m benchmarks.gpu.staged copies`, alone, or `ranks`, as a job.

copies: S1 and S3, how fast gradients get to the host and back, and what starting them costs the host.
ranks:  C1, that means are those of a plan on the host, bit for bit; and a table of plans and calls by size.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.gpu import say
from keras_hpc import _native
from keras_hpc.job import launch
from keras_hpc.job.plan import TensorSpec
from keras_hpc.job.team import Team
from keras_hpc.job.team_making import make_team


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["copies", "ranks"])
    parser.add_argument("--mib", type=float, default=100.0, help="gradients of a step")
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1, help="communication threads of a rank")
    parser.add_argument("--largest", type=int, default=256 << 20, help="bytes, of the table")
    arguments = parser.parse_args()
    if arguments.what == "copies":
        measure_copies(arguments.mib, arguments.tensors, arguments.steps // 10)
        return
    world = launch.connect(None)
    ordinal = world.local_rank % len(_native.visible_devices())
    team = make_team(world, 0, arguments.threads, 60.0, 30.0)
    try:
        check_bits(team, ordinal, arguments.steps)
        measure_sizes(team, ordinal, arguments.largest, arguments.threads)
    finally:
        team.close()
        world.close()


def measure_copies(mib: float, tensors: int, steps: int) -> None:
    """S1 and S3: a plan of one rank, which only copies to the host and back."""
    nbytes = int(mib * 2**20) // tensors // 4 * 4
    team = _native.Team(_native.in_process_transports([0])[0], 0, 0, 60.0, 60.0)
    with contextlib.closing(team):
        specs = [(f"gradient {number}", "float32", nbytes // 4) for number in range(tensors)]
        plan = team.plan("gradients", specs, "mean", False, in_segment=True)
        plan.open_device(0)
        arrays = [_native.DeviceArray(0, nbytes) for _ in range(tensors)]
        stream = arrays[0]
        starts, whole = [], []
        for _ in range(steps + 1):
            begin = time.perf_counter()
            for number, array in enumerate(arrays):
                plan.start_on(number, array.address, nbytes, 1.0, stream.stream)
            starts.append(time.perf_counter() - begin)
            plan.wait_on(stream.stream)
            stream.finish()
            whole.append(time.perf_counter() - begin)
        plan.end()
    ceiling = min(_native.device_speeds(0, nbytes))
    speed = tensors * nbytes / min(whole[1:])
    say("S1", f"{mib:g} MiB out and back, each way", speed / 1e9, "GB/s")
    part = speed / ceiling
    say("S1", f"against copies of {nbytes >> 10} KiB alone", 100 * part, "%", ">= 80", holds=part >= 0.8)
    each = 1e6 * float(np.median(starts[1:])) / tensors
    say("S3", "starting a tensor, on the host", each, "us", "<= 5", holds=each <= 5)


def check_bits(team: Team, ordinal: int, steps: int) -> None:
    """C1: weighted means of a plan on GPUs are those of a plan on the host, bit for bit, and equal on all ranks."""
    counts = [7, 1000, 300_000, 4096, 70_001]
    specs = [TensorSpec(f"t{number}", (count,), "float32") for number, count in enumerate(counts)]
    host = team.plan("on the host", specs)
    device = team.plan("on GPUs", specs, in_segment=True, device=ordinal)
    if device.device is None and team.size > 1:
        say("C1", "means on GPUs: a plan cannot use them", -1, "", "0", holds=False)
        return
    on_gpu = [_native.DeviceArray(ordinal, 4 * count) for count in counts]
    different, digest = 0, hashlib.sha256()
    for step in range(steps):
        random = np.random.default_rng([step, team.rank])
        arrays = [random.standard_normal(count, np.float32) for count in counts]
        weight = float(1 + (step + team.rank) % 3)
        for number, (array, place) in enumerate(zip(arrays, on_gpu, strict=True)):
            place.write(array.view(np.uint8))
            if not device.is_idle:
                device.start_on(number, place.address, array.nbytes, weight, on_gpu[0].stream)
            host.start(number, array, weight)
        host.wait_all()
        if not device.is_idle:
            device.wait_on(on_gpu[0].stream)
        on_gpu[0].finish()
        for array, place in zip(arrays, on_gpu, strict=True):
            found = np.empty_like(array)
            place.read(found.view(np.uint8))
            different += int((found.view(np.uint32) != array.view(np.uint32)).sum())
            digest.update(found.tobytes())
    digests = team.allgather_object([different, digest.hexdigest()], "C1")
    different = sum(found for found, _ in digests)
    equal = len({text for _, text in digests}) == 1
    if team.rank == 0:
        say("C1", f"values unlike the CPU's, {steps} steps", different, "", "0", holds=different == 0)
        say("C1", "ranks with other bits than rank 0", 0 if equal else 1, "", "0", holds=equal)


def measure_sizes(team: Team, ordinal: int, largest: int, threads: int) -> None:
    """Print milliseconds by size: of a plan on GPUs, of a call on GPUs, and of a plan and a call on the host."""
    size = 4096
    while size <= largest:
        array = np.zeros(size // 4, np.float32)
        place = _native.DeviceArray(ordinal, size)
        spec = [TensorSpec("x", array.shape, "float32")]
        plans = [
            team.plan(f"GPU {size}", spec, in_segment=True, device=ordinal),
            team.plan(f"host {size}", spec, in_segment=True, device=-1),
        ]

        def plan_on_gpu(array=array, place=place, plan=plans[0]) -> None:  # type: ignore[no-untyped-def]
            plan.start_on(0, place.address, array.nbytes, 1.0, place.stream)
            plan.wait_on(place.stream)
            place.finish()

        shared = plans[1].array(0)

        def plan_on_host(array=shared, plan=plans[1]) -> None:  # type: ignore[no-untyped-def]
            plan.start(0, array)  # which lies in the plan's memory: nothing is copied
            plan.wait_all()

        def call_on_gpu(array=array, place=place) -> None:  # type: ignore[no-untyped-def]
            team.allreduce_on(ordinal, place.address, array.shape, "float32", "sum", "x", place.stream)
            place.finish()

        def call_on_host(array=array) -> None:  # type: ignore[no-untyped-def]
            team.allreduce(array)

        ways = {"plan, GPU": plan_on_gpu, "plan, host": plan_on_host, "call, GPU": call_on_gpu}
        ways["call, host"] = call_on_host
        usable = plans[0].device is not None and not plans[0].is_idle
        for name, milliseconds in times_of(team, {k: v for k, v in ways.items() if usable or k != "plan, GPU"}):
            if team.rank == 0:
                say("allreduce", f"{size >> 10} KiB, {name}, {threads} threads", milliseconds, "ms")
        size *= 8


def times_of(team: Team, ways: dict[str, Callable[[], None]], repeats: int = 7) -> Sequence[tuple[str, float]]:
    found = []
    for name, way in ways.items():
        seconds = []
        for _ in range(repeats + 1):
            team.barrier()
            begin = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - begin)
        slowest = team.allgather(np.array([seconds[1:]])).max(axis=0)
        found.append((name, 1e3 * float(np.median(slowest))))
    return found


if __name__ == "__main__":
    main()
