"""Each call of a GPU's driver fails, one at a time: the same end on all ranks, and never a wrong value."""

import contextlib
import re

import numpy as np
import pytest
from device_steps import engine, fresh_driver, team_allreduce
from fake_cuda import Stream, Tensor
from in_process import as_bytes, run
from launch import ROOT

from keras_hpc import _native

STEPS = 4  # synchronous, pipelined twice, and synchronous again, with two updates
WEIGHTS = [1.0, 3.0]
# Of the start of a job, of measurements, and of ways from GPU to GPU.
NOT_OF_STEPS = ["cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuDeviceGetName", "cuDeviceGetUuid"]
NOT_OF_STEPS += ["cuDeviceGetPCIBusId", "cuMemAlloc", "cuMemFree", "cuMemcpyDtoDAsync", "cuDeviceGetAttribute"]
NOT_OF_STEPS += ["cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuIpcCloseMemHandle", "cuLaunchKernel"]
NOT_OF_STEPS += ["cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction"]
IN_STEPS = ["cuCtxPushCurrent", "cuPointerGetAttribute", "cuMemsetD32Async", "cuStreamQuery", "cuEventQuery"]


@pytest.fixture(autouse=True)
def fake():
    yield from fresh_driver()


def _functions() -> list[str]:
    table = (ROOT / "native" / "device" / "api.hpp").read_text()
    return [name for name in re.findall(r'X\(\w+, "(\w+?)(?:_v\d)?",', table) if name not in NOT_OF_STEPS]


def _input(rank: int, number: int) -> np.ndarray:
    return np.full(2000, 4.0 * rank + number, np.float32)


def _mean(number: int) -> np.ndarray:
    return np.full(2000, 3.0 + number, np.float32)


def _train(team, rank, plan, found):
    """Steps of a plan on the device, each ended on the host, and a call of its own; what comes out goes to `found`."""
    with contextlib.ExitStack() as kept:
        x, second = (Tensor(np.empty(2000, np.float32)) for _ in range(2))
        updates = Tensor(np.empty(1, np.int32))
        for tensor in (x, second, updates):
            kept.callback(tensor.free)
        # Closed first: after an error it may still have to write to them.
        stream = kept.enter_context(contextlib.closing(Stream()))
        for number in range(STEPS):
            x.write(stream, _input(rank, number))
            plan.start_beside(1, as_bytes(np.full(3, number, np.float32)), WEIGHTS[rank])
            plan.start_on(0, x.address, x.nbytes, WEIGHTS[rank], stream.handle)
            plan.wait_on(stream.handle)
            written = engine.khpc_write_updates(plan.id, updates.address, stream.handle)
            if written != 0:
                raise _native.Error(engine.khpc_last_error().decode())
            count = int(updates.read(stream)[0])
            if count > 0:
                found.append(x.read(stream))
            if count > 1:
                plan.second_on([second.address, 0], stream.handle)
                found.append(second.read(stream))
        team_allreduce(team, x, "max", stream)
        found.append(x.read(stream))
        team.barrier()


def _work(team, rank):
    """As keras_hpc does it: all ranks use their GPUs, or none. Returns how it ended, and what had come out."""
    plan = team.plan("x", [("x", "float32", 2000), ("n", "float32", 3)], "mean", True, "", True, True)
    plan.set_schedule(1, 2)
    problem, found = "", []
    try:
        plan.open_device(0)
    except _native.Error as error:
        problem = str(error)
    refused = np.array([len(problem)], np.int32)
    team.allreduce(as_bytes(refused), "int32", "max")
    if refused[0] > 0:
        if not problem:
            plan.close_device()
        return "refused", problem, found
    try:
        _train(team, rank, plan, found)
    except _native.Error as error:
        team.close()
        return "error", str(error), found
    plan.end()
    return "trained", "", found


def _check(fake, name: str, after: int) -> str:
    """Let a call fail; return how it ended, on both ranks."""
    fake.fake_reset(2, 100)
    fake.fake_fail(name.encode(), after)
    results = run([0, 0], _work)
    assert fake.fake_left() == fake.fake_faults() == 0
    (end,) = {end for end, _, _ in results}
    for _, _, found in results:
        for number, values in enumerate(found):
            assert (values == (_mean(number) if number < STEPS else np.full(2000, STEPS + 1.0))).all(), number
        assert end != "trained" or len(found) == STEPS + 1
    if end != "trained":
        of_driver = [f"The GPU's driver: {name} failed with CUDA_ERROR_UNKNOWN." in text for _, text, _ in results]
        assert sum(of_driver) == 1, results
        other = results[of_driver.index(False)][1]
        assert other == "" if end == "refused" else "met an error" in other, results
    return end


def _calls(fake) -> dict[str, int]:
    assert _check(fake, "", 0) == "trained"
    return {name: fake.fake_calls(name.encode()) for name in _functions()}


@pytest.mark.parametrize("name", IN_STEPS)
def test_a_call_in_a_step_fails(name, fake):
    calls = _calls(fake)
    assert min(calls.values()) > 0, calls
    # How often the device is asked, is another number each time, so an early one fails, of the first step.
    after = 2 if name.endswith("Query") else calls[name] // 2
    # Who only waits for its copies to be over has what it wants.
    assert _check(fake, name, after) == ("trained" if name == "cuStreamQuery" else "error")


@pytest.mark.soak
def test_each_call_fails(fake):
    ends: dict[str, set[str]] = {}
    for name, count in _calls(fake).items():
        # How often the device is asked, is another number each time.
        turns = range(0, count, max(1, count // 8)) if name.endswith("Query") else range(count)
        for after in turns:
            ends.setdefault(name, set()).add(_check(fake, name, after))
    # A plan's device may be refused; one that a call opens for itself is an error.
    opening = ("cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuEventCreate")
    expected = {name: {"refused", "error"} for name in opening}
    expected |= {"cuStreamCreateWithPriority": {"refused"}, "cuMemHostRegister": {"refused", "trained"}}
    in_steps = ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemsetD32Async", "cuEventRecord", "cuStreamWaitEvent")
    expected |= {name: {"error"} for name in (*in_steps, "cuPointerGetAttribute")}
    giving_back = ("cuStreamDestroy", "cuEventDestroy", "cuMemHostUnregister", "cuDevicePrimaryCtxRelease")
    expected |= {name: {"trained"} for name in (*giving_back, "cuCtxPopCurrent", "cuStreamQuery")}
    # Also of the end, when all is done.
    assert {"refused", "error"} <= ends.pop("cuCtxPushCurrent")
    assert "error" in ends.pop("cuEventQuery")
    assert ends == expected
