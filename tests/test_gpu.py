"""Keras with gradients that the engine takes from a GPU: one that is not there, see ranks/fake_gpu.py."""

import importlib.util
import json
import re

import fake_cuda
import pytest
from checks import settings_of
from endings import check_end
from launch import ROOT

CHECKS = ["exact", "pipeline", "own_loops"]
MORE = [
    "gradients",
    "fit",
    "checkpoint",
    "teams",
    "misuse",
    "losses",
    "keras",
    "loops",
    "idioms",
    "batch_norm",
    "backend",
    "random",
    "state",
    "optimizers",
]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        pytest.param("torch", CHECKS, id="torch-checks"),
        pytest.param("jax", ["gradients"], id="jax-gradients"),
        pytest.param("jax", ["pipeline"], marks=pytest.mark.soak, id="jax-pipeline"),
        *(pytest.param(backend, MORE, marks=pytest.mark.soak, id=f"{backend}-more") for backend in ("torch", "jax")),
    ],
)
def test_what_holds_on_the_host_holds_on_a_gpu(backend, names, run_ranks, tmp_path):
    _run(2, backend, names, run_ranks, tmp_path)


@pytest.mark.soak
@pytest.mark.mpi
def test_the_only_rank_copies_nothing(run_ranks, tmp_path):
    _run(1, "torch", ["gradients", "exact"], run_ranks, tmp_path)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("n", "nodes", "backend", "names"),
    [
        (2, 2, "torch", ["own_loops"]),
        pytest.param(2, 2, "torch", ["own_loops", "gradients"], marks=pytest.mark.soak),
        pytest.param(2, 1, "torch", ["own_loops", "gradients"], marks=pytest.mark.soak),
        pytest.param(2, 1, "jax", ["fit"], marks=pytest.mark.soak),
        pytest.param(3, 2, "torch", ["own_loops", "fit"], marks=pytest.mark.soak),
        pytest.param(4, 2, "torch", ["own_loops", "gradients", "fit"], marks=pytest.mark.soak),
        pytest.param(4, 2, "jax", ["fit"], marks=pytest.mark.soak),
    ],
)
def test_what_holds_on_the_host_holds_by_nccl(n, nodes, backend, names, run_ranks, tmp_path):
    """What it does not reduce is staged, as pipelined teams are. Four ranks on two nodes: within these only."""
    env = _by_nccl(tmp_path, "hierarchical" if n == 4 else "nccl")
    _run(n, backend, names, run_ranks, tmp_path, env | {"MPIR_CVAR_NUM_CLIQUES": str(nodes)})


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("n", "backend", "names"),
    [
        (2, "torch", ["own_loops"]),
        pytest.param(3, "torch", ["fit", "gradients", "pipeline"], marks=pytest.mark.soak),
        pytest.param(2, "jax", ["fit", "gradients"], marks=pytest.mark.soak),
    ],
)
def test_what_holds_on_the_host_holds_by_the_kernel(n, backend, names, run_ranks, tmp_path):
    """Ranks share a GPU, and reach each other's memory between processes."""
    _run(n, backend, names, run_ranks, tmp_path, _by_peer(tmp_path))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("n", "backend", "names"),
    [
        (2, "torch", ["own_loops"]),
        pytest.param(3, "torch", ["fit", "gradients", "pipeline"], marks=pytest.mark.soak),
        pytest.param(4, "torch", ["exact", "own_loops"], marks=pytest.mark.soak),
        pytest.param(2, "jax", ["fit", "gradients"], marks=pytest.mark.soak),
    ],
)
def test_what_holds_on_the_host_holds_by_mpi(n, backend, names, run_ranks, tmp_path):
    """By a real MPI library between nodes, which is told where the GPU's memory is."""
    _run(n, backend, names, run_ranks, tmp_path, _by_mpi(tmp_path) | {"MPIR_CVAR_NUM_CLIQUES": "2"})


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.parametrize("enabled", ["1", "0"])
def test_ranks_that_share_a_gpu_use_nccl_only_if_it_lets_them(enabled, run_ranks, tmp_path):
    sharing = {"TESTS_SHARED_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": enabled}
    _run(2, "torch", ["exact"], run_ranks, tmp_path, _by_nccl(tmp_path) | sharing)


def _choose(n, program, run_ranks, folder):
    env = {
        "TESTS_FAKE_GPU": str(fake_cuda.build(folder)),
        "TESTS_FAKE_NCCL": str(fake_cuda.build_nccl(folder)),
        "TESTS_FAKE_NVRTC": str(fake_cuda.build_nvrtc(folder)),
        "TESTS_GPU_AWARE_MPI": str(fake_cuda.build_gpu_aware_mpi(folder)),
        "XDG_CACHE_HOME": str(folder),
        "MPIR_CVAR_NUM_CLIQUES": str(n // 2),
    }
    done = run_ranks(n, [ROOT / "tests" / "ranks" / program], env=env, lean=False)
    assert done.output.count("is done>") == n
    return done.output


@pytest.mark.mpi
def test_a_trial_says_which_way_plans_go(run_ranks, tmp_path):
    output = _choose(2, "choose_device_way.py", run_ranks, tmp_path)
    assert output.count("NCCL is not used; rank 1: NCCL: ncclGetVersion failed") == 1
    assert output.count("NCCL is not used; rank 1: The GPU's driver: cuMemAlloc failed") == 1
    compiling = "The kernel between GPUs is not used; rank 0: rank 1: NVRTC: nvrtcCompileProgram failed: NVRTC_ERROR_"
    assert output.count(compiling + "INTERNAL_ERROR. the kernel is wrong") == 1
    assert output.count("The kernel between GPUs is not used; its means are wrong on ranks [0, 1]") == 2


@pytest.mark.soak
@pytest.mark.mpi
def test_a_trial_says_which_way_plans_go_across_nodes(run_ranks, tmp_path):
    output = _choose(4, "choose_across_nodes.py", run_ranks, tmp_path)
    assert output.count("NCCL is not used; rank 0: NCCL: ncclGetUniqueId failed") == 1


def _by_peer(folder):
    return {"TESTS_FAKE_NVRTC": str(fake_cuda.build_nvrtc(folder)), "KERAS_HPC_ALLREDUCE": "device:0-=peer"}


def _by_mpi(folder):
    library = fake_cuda.build_gpu_aware_mpi(folder)
    return _by_peer(folder) | {"TESTS_GPU_AWARE_MPI": str(library), "KERAS_HPC_ALLREDUCE": "device:0-=mpi"}


def _by_nccl(folder, way="nccl"):
    return {"TESTS_FAKE_NCCL": str(fake_cuda.build_nccl(folder)), "KERAS_HPC_ALLREDUCE": f"device:0-={way}"}


def _run(n, backend, names, run_ranks, tmp_path, more=()):
    library = fake_cuda.build(tmp_path)
    ranks = ROOT / "tests" / "ranks"
    checks = [ranks / f"check_{name}.py" for name in names]
    checks = [path for path in checks if backend in settings_of(path)["RANKS"]]
    args = [ranks / "run_check.py", 60, tmp_path, *checks]
    # Keras computes some layers with TensorFlow's functions, whatever the backend is.
    env = {"TESTS_FAKE_GPU": str(library), "TESTS_TENSORFLOW": "1" if names is MORE else ""}
    env |= {"KERAS_HPC_ALLREDUCE": "device:0-=staged", **dict(more)}
    try:
        run_ranks(n, args, timeout=200, backend=backend, env=env)
    except pytest.fail.Exception as failure:
        logs = [log.read_text(errors="replace")[-8000:] for log in sorted(tmp_path.glob("rank*.txt"))]
        pytest.fail("\n".join([str(failure), *logs]), pytrace=False)
    for log in sorted(tmp_path.glob("rank*.txt")):
        assert " FAILED" not in log.read_text()
        assert checks[-1].name in log.read_text()


def soak_of(*hows):
    """Cases that `make test` leaves out for their time."""
    return [pytest.param(how, "", marks=pytest.mark.soak) for how in hows]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", ""),
        *soak_of("killed by nccl", "killed within nodes by nccl", "killed by peer", "killed by mpi"),
        ("driver", "The GPU's driver: cuMemcpyDtoHAsync failed with CUDA_ERROR_UNKNOWN"),
        pytest.param("hangs", "rank 1", marks=pytest.mark.soak),
        pytest.param("elsewhere", "is not in a GPU's memory. Expected a tensor on GPU 0", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_fails_in_the_middle_of_a_step_ends_the_job(how, said, run_ranks, tmp_path):
    env = {"TESTS_FAKE_GPU": str(fake_cuda.build(tmp_path)), "KERAS_HPC_ALLREDUCE": "device:0-=staged"}
    within_nodes = "within nodes" in how
    if how.endswith("nccl"):
        env |= _by_nccl(tmp_path, "hierarchical" if within_nodes else "nccl")
    if how.endswith("peer"):
        env |= _by_peer(tmp_path)
    if how.endswith("mpi"):
        env |= _by_mpi(tmp_path)
    env["MPIR_CVAR_NUM_CLIQUES"] = "2" if within_nodes or how.endswith("mpi") else "1"
    args = [ROOT / "tests" / "ranks" / "fail_on_gpu.py", how.split()[0]]
    done = run_ranks(4 if within_nodes else 2, args, backend="torch", env=env, expect_failure=True)
    assert said in done.output
    check_end(done)


COMPILE = pytest.param(
    "compile",
    marks=pytest.mark.skipif(
        not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
        reason="XLA's compiler for GPUs is not here: pip install jax[cuda13]",
    ),
)


@pytest.mark.parametrize("how", ["lower", COMPILE])
def test_what_xla_is_told_of_a_gpu(how, run_ranks):
    env = {"PYTHONPATH": str(ROOT)}
    program = ROOT / "tests" / "ranks" / "lower_for_cuda.py"
    done = run_ranks(1, [program, how], backend="jax", mpi=False, env=env)
    calls = {}
    for line in done.output.splitlines():
        if found := re.search(r'custom_call_target="khpc_jax_(\w+)"', line):
            calls.setdefault(found[1], []).append(line)
    assert {name: len(lines) for name, lines in calls.items()} == {
        "start_on": 4,
        "wait_on": 1,
        "turn_on": 1,
        "second_on": 1,
        "allreduce_on": 1,
    }
    shows_numbers = "backend_config" in done.output  # not that of jaxlib 0.5
    for name, lines in calls.items():
        for line in lines:
            # In place, never left out, and with the numbers that the handler reads on the host.
            assert "output_to_operand_aliasing" in line
            assert "custom_call_has_side_effect=true" in line
            assert "api_version=API_VERSION_TYPED_FFI" in line
            assert not shows_numbers or ("device = 0 : i32" if name == "allreduce_on" else "plan = ") in line
    # With accumulation a step that does not reduce branches around it: no handler reads the condition.
    assert "conditional(" in done.output


@pytest.fixture(scope="module")
def gpus_of_tensorflow(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    return fake_cuda.build_for_tensorflow(folder), fake_cuda.build(folder)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("n", "env"),
    [(2, {}), *(pytest.param(n, {"TESTS_SOAK": "1"}, marks=pytest.mark.soak) for n in (1, 2, 3))],
    ids=["2", "1-all", "2-all", "3-all"],
)
def test_tensorflow_on_gpus_gives_the_bits_of_the_cpu(n, env, gpus_of_tensorflow, run_ranks, tmp_path):
    results = []
    for libraries in ((), gpus_of_tensorflow):
        out = tmp_path / f"{len(libraries)}.json"
        env = env | {"KERAS_HPC_ALLREDUCE": "device:0-=staged"}
        done = run_ranks(n, [ROOT / "tests" / "ranks" / "train_on_gpu.py", out, *libraries], env=env)
        results.append(json.loads(out.read_text()))
    on_cpu, on_gpu = results
    assert on_cpu.pop("devices") == []
    assert on_gpu.pop("devices") == ["/physical_device:GPU:0"]  # rank 0's, of two
    assert "rank 0 computes on GPU 0 (Fake GPU" in done.output
    assert done.output.count("2 ranks of this node compute on one GPU") == (n == 3)  # said once for each GPU
    assert on_gpu.pop("gradients lent") == (0 if n == 1 else 4)
    assert done.output.count("are copied to the host while nothing else is done; rank 0: ") == (n > 1)
    assert on_cpu.pop("allreduce") == ["CPU", "CPU"]
    assert on_gpu.pop("allreduce") == ["GPU", "GPU"]
    for case, found in on_gpu.items():
        if isinstance(found, dict):
            assert (found.pop("on"), on_cpu[case].pop("on")) == (["GPU"], ["CPU"])
    if n == 1:  # which TensorFlow alone does not compute alike twice on this device, with or without keras_hpc
        on_gpu.pop("rows of an embedding")
        on_cpu.pop("rows of an embedding")
    assert on_gpu == on_cpu
    assert on_cpu["sum"] == on_cpu["broadcast"] == 0


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("memory", "CUDA out of memory"),
        ("started", "TensorFlow has started its devices, so that no GPU can be chosen for this rank any more"),
    ],
)
def test_a_gpu_that_one_rank_does_not_get(what, said, gpus_of_tensorflow, run_ranks):
    done = run_ranks(2, [ROOT / "tests" / "ranks" / "refused_device.py", what, *gpus_of_tensorflow])
    assert re.search(rf"<1: \w+: {said}", done.output), done.output
    assert re.search(rf"<0: LaunchError: .*refused on rank 1. \w+: {said}", done.output), done.output


@pytest.mark.mpi
def test_tensorflow_moves_no_buffer_while_it_is_reduced(gpus_of_tensorflow, run_ranks):
    """Neither to a GPU, nor there; nor is one read before it has been computed."""
    env = {"KERAS_HPC_ALLREDUCE": "device:0-=staged"}
    done = run_ranks(2, [ROOT / "tests" / "ranks" / "reduce_on_gpu.py", *gpus_of_tensorflow], env=env)
    assert done.output.count("is done>") == 2
    for rank in range(2):
        for number in range(5):
            assert f"<{rank}: [{number + 0.5}, {number + 0.5}]>" in done.output, done.output
