"""Plans on GPUs that are not there: a trial says whether NCCL reduces them, once for each class of sizes.

On 2 ranks of a node, with TESTS_FAKE_GPU and TESTS_FAKE_NCCL.
"""

import sys

from device_ways import fake, nccl, pretend, rank, trials, way_of, world

from keras_hpc.job import tuning_cache
from keras_hpc.job.team_making import make_team

team = make_team(world, 0, 1, 60.0, 30.0)
other = make_team(world, 1, 1, 60.0, 30.0)
pretend(staged=1.0, nccl=0.5)
assert way_of(team, "small", 1000) == "nccl"
assert trials == ["staged", "nccl"]
assert way_of(team, "small, too", 16384) == "nccl"
assert len(trials) == 2
pretend(staged=1.0, nccl=0.9)  # not worth other bits
assert way_of(team, "larger", 16385) == "staged"
assert len(trials) == 4
assert way_of(team, "as large", 65536) == "staged"
assert way_of(other, "of another team", 200_000) == "staged"
assert len(trials) == 4
# What was measured is the same on all ranks, and kept.
known = [choice for choice in tuning_cache.known(team.native) if choice[0] == "device"]
assert known == [["device", 0, 65537, "nccl"], ["device", 65537, 262145, "staged"]], known
# One rank cannot connect: all are staged.
if rank == 1:
    nccl.fake_nccl_fail(b"ncclGetVersion", 0)
pretend(staged=1.0, nccl=0.5)
assert way_of(team, "without", 100_000) == "staged"
assert way_of(team, "still without", 100_000) == "staged"
assert trials[4:] == ["staged"]
tuning_cache.save(team.native, rank, team.selection_key)  # of two jobs that have found the same
team.close()
team = make_team(world, 0, 1, 60.0, 30.0)
assert way_of(team, "of a later job", 1000) == "nccl"
assert len(trials) == 5
assert way_of(team, "tried again", 100_000) == "nccl"
assert trials[5:] == ["staged", "nccl"]
team.close()
other.close()
other = make_team(world, 1, 1, 60.0, 30.0)
assert way_of(other, "of another team of a later job", 1000) == "staged"
# One GPU has no memory left: nobody waits for that rank in a trial.
team = make_team(world, 0, 1, 60.0, 30.0)
if rank == 1:
    fake.fake_fail(b"cuMemAlloc", 0)
assert way_of(team, "without memory", 1_000_000) == "staged"
assert len(trials) == 7
team.close()
other.close()
world.close()
sys.stdout.write(f"<{rank} is done>\n")
