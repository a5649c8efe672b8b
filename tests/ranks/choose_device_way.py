"""Plans on GPUs that are not there: a trial says which way they are reduced, once for each class of sizes.

On 2 ranks of a node, with TESTS_FAKE_GPU, TESTS_FAKE_NCCL and TESTS_FAKE_NVRTC.
"""

import os
import sys

from device_ways import fake, nccl, nvrtc, pretend, rank, trials, way_of, world

from keras_hpc.job import tuning_cache
from keras_hpc.job.team_making import make_team


def new_team(index=0):
    """Return one that has tried nothing yet."""
    return make_team(world, index, 1, 60.0, 30.0)


# One rank cannot compile the kernel.
team = new_team()
nvrtc.fake_nvrtc_fail(b"nvrtcCompileProgram" if rank == 1 else b"")
pretend(staged=1.0, nccl=2.0)
assert way_of(team, "without a kernel", 1000) == "staged"
assert team.lacks_ways == {"peer"}
nvrtc.fake_nvrtc_fail(b"")
trials.clear()
team.close()

team, other = new_team(), new_team(1)
pretend(staged=1.0, peer=0.6, nccl=0.4)
assert way_of(team, "small", 1000) == "nccl"
assert trials == ["staged", "peer", "nccl"]
assert way_of(team, "small, too", 16384) == "nccl"
assert len(trials) == 3
pretend(staged=1.0, peer=1.1, nccl=0.9)  # not worth other bits
assert way_of(team, "larger", 16385) == "staged"
assert len(trials) == 6
assert way_of(team, "as large", 65536) == "staged"
assert way_of(other, "of another team", 200_000) == "staged"
assert len(trials) == 6
# What was measured is the same on all ranks, and kept.
known = [choice for choice in tuning_cache.known(team.native) if choice[0] == "device"]
assert known == [["device", 0, 65537, "nccl"], ["device", 65537, 262145, "staged"]], known
pretend(staged=1.0, peer=0.9, nccl=0.8)  # but the kernel has the bits of the host
assert way_of(team, "larger still", 65537) == "peer"
assert trials[6:] == ["staged", "peer", "nccl"]
# One rank cannot connect: all are staged.
if rank == 1:
    nccl.fake_nccl_fail(b"ncclGetVersion", 0)
pretend(staged=1.0, peer=1.1, nccl=0.5)
assert way_of(team, "without", 300_000) == "staged"
assert trials[9:] == ["staged", "peer"]
assert way_of(team, "still without", 300_000) == "staged"
assert trials[11:] == ["staged", "peer"]
tuning_cache.save(team.native, rank, team.selection_key)  # of two jobs that have found the same
team.close()
team = new_team()
assert way_of(team, "of a later job", 1000) == "nccl"
assert len(trials) == 13
assert way_of(team, "tried again", 300_000) == "nccl"
assert trials[13:] == ["staged", "peer", "nccl"]
team.close()
other.close()
other = new_team(1)
assert way_of(other, "of another team of a later job", 1000) == "staged"
other.close()
# One GPU has no memory left: nobody waits for that rank in a trial.
team = new_team()
if rank == 1:
    fake.fake_fail(b"cuMemAlloc", 0)
assert way_of(team, "without memory", 5_000_000) == "staged"
assert len(trials) == 16
team.close()
# A way that is wrong is not used, however fast it is.
pretend(staged=1.0, peer=0.1, nccl=2.0)
for how, wrong in ((1, {"peer"}), (2, {"peer", "nccl"})):
    team = new_team()
    fake.fake_spoil(how)
    assert way_of(team, "spoiled", 5_000_000) == "staged"
    assert team.lacks_ways == wrong
    fake.fake_spoil(0)
    team.close()
# As asked for, also of another team.
os.environ["KERAS_HPC_ALLREDUCE"] = "device:0-=peer"
teams = [new_team(index) for index in range(2)]
assert [way_of(team, "as asked for", 20_000) for team in teams] == ["peer"] * 2
for team in teams:
    team.close()
world.close()
sys.stdout.write(f"<{rank} is done>\n")
