"""keras_hpc.memory: freed memory stays with the process, so a step needs no new pages; the user's wishes go first."""

import json
import platform
import re
import subprocess
import sys

import pytest
from launch import child_environment

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")

TRAIN = """
import json, os, resource
import keras, numpy as np
import keras_hpc

keras_hpc.init(**json.loads(os.environ["ARGUMENTS"]))

class Faults(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        steps.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

steps = []
model = keras.Sequential([keras.Input((2048,)), keras.layers.Dense(8192), keras.layers.Dense(1)])  # 64 MiB of weights
model.compile("sgd", "mse", jit_compile=keras.backend.backend() == "jax")
x, y = np.zeros((80, 2048), np.float32), np.zeros((80, 1), np.float32)
model.fit(x, y, batch_size=4, verbose=0, callbacks=[Faults()])
print("FAULTS", json.dumps(np.diff(steps).tolist()))
"""


def faults(run_ranks, backend, **arguments):
    """Page faults of each step but the first."""
    done = run_ranks(1, ["-c", TRAIN], backend=backend, env={"ARGUMENTS": json.dumps(arguments)}, mpi=False)
    return sorted(json.loads(done.output.partition("FAULTS ")[2]))


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.soak)])
def test_steps_need_no_new_pages(backend, run_ranks):
    wanted = faults(run_ranks, backend)
    assert wanted[len(wanted) // 2] < 100
    # What it is without: the gradient of the first layer alone has 16,384 pages.
    as_it_comes = faults(run_ranks, backend, keep_memory=False)
    assert as_it_comes[len(as_it_comes) // 2] > 8_000


SHARDED = """
import gc, os
import keras, numpy as np
import keras_hpc

keras_hpc.init(shard_optimizer=os.environ["SHARD"] == "1", keep_memory=False)
model = keras.Sequential([keras.Input((2000,)), *[keras.layers.Dense(2000) for _ in range(4)], keras.layers.Dense(1)])
model.compile("adam", "mse", jit_compile=keras.backend.backend() == "jax")
model.fit(np.ones((20, 2000), np.float32), np.ones((20, 1), np.float32), batch_size=2, epochs=3, verbose=0)
gc.collect()
resident = next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
print(f"<{keras_hpc.rank()}: {resident} of {4 * model.count_params() / 2**20}>")
"""


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_a_rank_holds_its_part_of_an_optimizer(backend, ranks, run_ranks):
    found = []
    for shard in "01":
        env = {"SHARD": shard}
        if shard == "0":  # what `init(shard_optimizer=True)` does by itself: what is freed goes back at once
            env |= {"MALLOC_MMAP_THRESHOLD_": "1000000", "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "true"}
        output = run_ranks(ranks, ["-c", SHARDED], backend=backend, env=env, lean=False).output
        said = re.findall(r"<\d: ([\d.]+) of ([\d.]+)>", output)
        assert len(said) == ranks, output
        found.append(sum(float(resident) for resident, _ in said) / ranks)
    weights = float(said[0][1])
    assert found[0] - found[1] == pytest.approx(2 * weights * (1 - 1 / ranks), rel=0.05)  # Adam keeps two moments


@pytest.mark.parametrize(
    "env",
    [{"MALLOC_ARENA_MAX": "4"}, {"MALLOC_MMAP_THRESHOLD_": "1000"}, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}],
    ids=str,
)
def test_what_the_user_has_set_stays(env, run_ranks):
    code = "from keras_hpc.job import resources; print('KEPT', resources.keep_freed())"
    assert "KEPT False" in run_ranks(1, ["-c", code], env=env, mpi=False).output
    assert "KEPT True" in run_ranks(1, ["-c", code], mpi=False).output


def test_what_loading_left_is_given_back(run_ranks):
    code = """
import numpy as np
from keras_hpc.job import resources
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
resources.keep_freed()
held = [np.ones(2**20) for _ in range(64)]  # 512 MiB
held = held[1::2] + held[-1:]  # with holes
before = resident()
resources.give_back()
print("FELL", int(before - resident()))
"""
    output = run_ranks(1, ["-c", code], mpi=False).output
    assert int(output.partition("FELL ")[2].split()[0]) > 200, output


@pytest.mark.soak
def test_what_the_compiler_of_jax_left_is_given_back(run_ranks):
    code = """
import jax, numpy as np
import keras_hpc
from keras_hpc.backends import jax_compiling
jax_compiling._LONG = 0
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
def given_back(function):
    held = [np.ones(2**20) for _ in range(64)]  # 512 MiB
    held = held[1::2] + held[-1:]  # with holes
    before = resident()
    jax.jit(function)(1.0)
    return int(before - resident())
keras_hpc.init()
print("IN A JOB", given_back(lambda x: x * 2))
keras_hpc.finalize()
print("AFTER IT", given_back(lambda x: x * 3))
"""
    output = run_ranks(1, ["-c", code], backend="jax", env={"MALLOC_MMAP_MAX_": "0"}, mpi=False).output
    within, after = (int(output.partition(words)[2].split()[0]) for words in ("IN A JOB", "AFTER IT"))
    assert within > 200, output
    assert after < 50, output


_FREED = """
import ctypes
import sys

from keras_hpc.job import resources

if sys.argv[1] == "return":
    resources.return_large()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


def block(size):
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    return address


def held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


libc.free(block(20 << 20))  # after which glibc keeps all up to that size
first, second = block(16 << 20), block(16 << 20)
before = held()
libc.free(first)
print(before - held())
"""


@pytest.mark.parametrize(("how", "returned"), [("return", 16), ("usual", 0)])
def test_large_blocks_go_back_at_once(how, returned):
    command = [sys.executable, "-c", _FREED, how]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) == pytest.approx(returned, abs=2)
