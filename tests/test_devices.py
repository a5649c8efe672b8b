"""Each rank computes on a GPU of its own, however the launcher shows them."""

import re

import fake_cuda
import pytest
from launch import ROOT

from keras_hpc.errors import LaunchError
from keras_hpc.job import devices


@pytest.mark.parametrize(
    ("lists", "chosen"),
    [
        ([[], []], [None, None]),
        ([["a", "b", "c", "d"]] * 4, [0, 1, 2, 3]),
        ([["a", "b"]] * 4, [0, 1, 0, 1]),
        ([["a", "b", "c"]], [0]),
        ([["a"], ["b"], ["c"]], [0, 0, 0]),
        ([["MIG-1"], ["MIG-2"]], [0, 0]),
        ([["a"], ["a"], ["b"]], [0, 0, 0]),
    ],
)
def test_ranks_share_out_what_they_see(lists, chosen):
    assert [devices.choose(lists, rank) for rank in range(len(lists))] == chosen


@pytest.mark.parametrize(
    "lists", [[["a", "b"], ["c", "d"]], [["a"], []], [["a", "b"], ["b", "a"]], [["a", "b"], ["a"]]]
)
def test_what_nobody_can_know_is_an_error_that_shows_it(lists):
    for rank in range(2):
        with pytest.raises(LaunchError, match=r"local rank 0: a.*\n  local rank 1: ") as error:
            devices.choose(lists, rank)
        assert "CUDA_VISIBLE_DEVICES" in str(error.value)


@pytest.mark.parametrize("device", ["gpu", -1, True, 1.0, None])
def test_bad_arguments(device):
    with pytest.raises(ValueError, match=re.escape(f"Received: device={device!r}")):
        devices.check_argument(device)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return fake_cuda.build(tmp_path_factory.mktemp("fake"))


# The last byte of a UUID is that of the GPU: 0f, 1f, 2f ...
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("shown", "wishes", "expected"),
    [
        ("0:4,0:4,0:4", "auto,auto,auto", ["0 0f of 1", "1 1f of 1", "2 2f of 1"]),
        ("0:2,0:2,0:2", "auto,auto,auto", ["0 0f of 2", "1 1f of 1", "0 0f of 2"]),
        ("0:1,1:1,2:1", "auto,auto,auto", ["0 0f of 1", "0 1f of 1", "0 2f of 1"]),
        ("0:3,0:3,0:3", "2,auto,cpu", ["2 2f of 1", "0 0f of 1", "the CPU"]),
        ("0:2,0:2,0:2", "1,1,1", ["1 1f of 3"] * 3),
        ("0:0,0:0,0:0", "auto,auto,auto", ["the CPU"] * 3),
        ("0:2,1:2,0:2", "auto,auto,auto", ["LaunchError: .* local rank 1: GPU-10.*, GPU-20"] * 3),
        ("0:2,0:2,0:2", "0,2,1", ["LaunchError: Local rank 1 sees 2 GPUs.*init.device=2."] * 3),
    ],
)
def test_real_ranks_agree(shown, wishes, expected, library, run_ranks):
    done = run_ranks(3, [ROOT / "tests" / "ranks" / "choose_devices.py", library, shown, wishes], lean=False)
    for rank, text in enumerate(expected):
        assert re.search(rf"<{rank}: {text}", done.output), done.output


@pytest.fixture(scope="module")
def old_library(tmp_path_factory):
    return fake_cuda.build(tmp_path_factory.mktemp("old"), without="cuEventQuery")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("", "The CUDA driver of this machine is too old: it has no function cuEventQuery. Expected one for CUDA 11.4"),
        ("cuInit", "The CUDA driver does not start .cuInit.: CUDA_ERROR_UNKNOWN"),
        ("cuDeviceGet", "The GPU's driver: cuDeviceGet failed with CUDA_ERROR_UNKNOWN"),
    ],
)
def test_a_driver_that_is_of_no_use_is_an_error_on_all_ranks(call, said, library, old_library, run_ranks):
    libraries = f"{library},{library if call else old_library}"
    args = [ROOT / "tests" / "ranks" / "choose_devices.py", libraries, "0:2,0:2,0:2", "auto,auto,auto"]
    done = run_ranks(3, [*args, *filter(None, [call])], lean=False)
    for rank in range(3):
        heard = "" if rank == 1 else r"keras_hpc.init\(\) was refused on rank 1. LaunchError: "
        assert re.search(f"<{rank}: LaunchError: {heard}{said}", done.output), done.output


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.soak)])
def test_a_gpu_that_one_rank_cannot_use(backend, library, run_ranks):
    def trained(*call):
        args = [ROOT / "tests" / "ranks" / "refused_gpu.py", *call]
        env = {"TESTS_FAKE_GPU": str(library), "KERAS_HPC_ALLREDUCE": "device:0-=staged"}
        output = run_ranks(2, args, backend=backend, env=env).output
        said = dict(re.findall(r"<(\d): (.*)>", output))
        return [said["0"], said["1"]], output

    weights = trained()[0]
    for call in ("cuMemHostRegister", "cuDevicePrimaryCtxRetain"):
        said, output = trained(call)
        reason = f"rank 1: The GPU's driver: {call} failed with CUDA_ERROR_UNKNOWN."
        assert output.count(f"are copied to the host while nothing else is done; {reason}") == 1, "one line"
        if backend == "torch":
            assert said == weights
        else:
            assert all("cannot use the GPU, as was said when it was made" in text for text in said), output


def test_doctor_describes_what_a_rank_computes_on():
    fake = fake_cuda.driver()
    fake.fake_reset(2, 0)
    device = devices.Device(1, "Fake GPU", "GPU-1", "0000:ff:00.0")
    assert devices.describe(device) == "GPU 1: Fake GPU, GPU-1, bus 0000:ff:00.0; driver for CUDA 13.0"
    assert "cannot use the 2 GPUs" in devices.describe(None)
    fake.fake_fail(b"cuDeviceGetCount", 0)
    assert "cuDeviceGetCount failed" in devices.describe(None)
    fake.fake_reset(0, 0)
    assert devices.describe(None) == "the CPU; no GPU"
