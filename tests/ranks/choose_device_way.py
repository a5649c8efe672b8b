"""Plans on GPUs that are not there: a trial says whether NCCL reduces them, once for each class of sizes.

On 2 ranks, with TESTS_FAKE_GPU and TESTS_FAKE_NCCL.
"""

import ctypes
import os
import sys

import numpy as np

fake = ctypes.CDLL(os.environ["TESTS_FAKE_GPU"])
fake.fake_reset(2, 30)
nccl = ctypes.CDLL(os.environ["TESTS_FAKE_NCCL"])

from keras_hpc import _native  # noqa: E402
from keras_hpc.job import device_plans, launch, tuning_cache  # noqa: E402
from keras_hpc.job.plan import TensorSpec  # noqa: E402
from keras_hpc.job.team_making import make_team  # noqa: E402

world = launch.connect(None)
rank = world.rank
measure, trials = device_plans._seconds, []


def pretend(staged, by_nccl):
    """Measure, and believe this."""

    def seconds(plan, memory):
        before = nccl.fake_nccl_calls(b"ncclAllReduce")
        assert measure(plan, memory) > 0
        trials.append("nccl" if nccl.fake_nccl_calls(b"ncclAllReduce") > before else "staged")
        return by_nccl if trials[-1] == "nccl" else staged

    device_plans._seconds = seconds


def way_of(team, name, count, **options):
    """Return which way a new plan goes, once it was seen to be right."""
    plan = team.plan(name, [TensorSpec("x", (count,), options.pop("dtype", "float32"))], device=rank, **options)
    before = nccl.fake_nccl_calls(b"ncclAllReduce")
    x = _native.DeviceArray(rank, 4 * count)
    x.write(np.full(count, 1.0 + 2 * rank, np.float32).view(np.uint8))
    plan.start_on(0, x.address, 4 * count, 1.0, x.stream)
    plan.wait_on(x.stream)
    found = np.empty(count, np.float32)
    x.read(found.view(np.uint8))
    assert (found == 2.0).all()
    return "nccl" if nccl.fake_nccl_calls(b"ncclAllReduce") > before else "staged"


team = make_team(world, 0, 1, 60.0, 30.0)
other = make_team(world, 1, 1, 60.0, 30.0)
pretend(1.0, 0.5)
assert way_of(team, "small", 1000, in_segment=True) == "nccl"
assert trials == ["staged", "nccl"]
assert way_of(team, "small, too", 16384, in_segment=True) == "nccl"
assert len(trials) == 2
pretend(1.0, 0.9)  # not worth other bits
assert way_of(team, "larger", 16385, in_segment=True) == "staged"
assert len(trials) == 4
assert way_of(team, "as large", 65536, in_segment=True) == "staged"
assert way_of(other, "of another team", 200_000, in_segment=True) == "staged"
assert len(trials) == 4
# What was measured is the same on all ranks, and kept.
known = [choice for choice in tuning_cache.known(team.native) if choice[0] == "device"]
assert known == [["device", 0, 65537, "nccl"], ["device", 65537, 262145, "staged"]], known
# One rank cannot connect: all are staged.
if rank == 1:
    nccl.fake_nccl_fail(b"ncclGetVersion", 0)
pretend(1.0, 0.5)
assert way_of(team, "without", 100_000, in_segment=True) == "staged"
assert way_of(team, "still without", 100_000, in_segment=True) == "staged"
assert trials[4:] == ["staged"]
team.close()
team = make_team(world, 0, 1, 60.0, 30.0)
assert way_of(team, "of a later job", 1000, in_segment=True) == "nccl"
assert len(trials) == 5
assert way_of(team, "tried again", 100_000, in_segment=True) == "nccl"
assert trials[5:] == ["staged", "nccl"]
team.close()
other.close()
other = make_team(world, 1, 1, 60.0, 30.0)
assert way_of(other, "of another team of a later job", 1000, in_segment=True) == "staged"
# One GPU has no memory left: nobody waits for that rank in a trial.
team = make_team(world, 0, 1, 60.0, 30.0)
if rank == 1:
    fake.fake_fail(b"cuMemAlloc", 0)
assert way_of(team, "without memory", 1_000_000, in_segment=True) == "staged"
assert len(trials) == 7
team.close()
other.close()
world.close()
sys.stdout.write(f"<{rank} is done>\n")
