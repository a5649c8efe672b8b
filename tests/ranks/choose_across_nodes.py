"""Plans on GPUs that are not there, on two nodes: by NCCL alone, by NCCL within nodes and the engine between them, or
by MPI.

On 4 ranks of 2 nodes, with TESTS_FAKE_GPU, TESTS_FAKE_NCCL, TESTS_FAKE_NVRTC and TESTS_GPU_AWARE_MPI.
"""

import os
import sys

from device_ways import nccl, pretend, rank, trials, way_of, world

from keras_hpc.job import tuning_cache
from keras_hpc.job.team_making import make_team

assert world.node_count == 2
team = make_team(world, 0, 1, 60.0, 30.0)
team.native.add_choice("network", 0, tuning_cache.ANY, "pairwise")  # measuring takes long where cores are few
pretend(staged=1.0, nccl=0.6, hierarchical=0.5, mpi=0.55)
assert way_of(team, "small", 1000) == "hierarchical"
assert trials == ["staged", "nccl", "hierarchical", "mpi"]
pretend(staged=1.0, nccl=0.5, hierarchical=0.6, mpi=0.45)
assert way_of(team, "larger", 16385) == "mpi"
# Values may be rounded between nodes, though not by NCCL.
assert way_of(team, "rounded", 1001, wire_dtype="bfloat16") == "hierarchical"
assert len(trials) == 8
assert "device 16 B: hierarchical" in tuning_cache.describe(team.native)
# NCCL does not connect nodes.
if rank == 0:
    nccl.fake_nccl_fail(b"ncclGetUniqueId", 0)
pretend(staged=1.0, hierarchical=0.9, mpi=0.9)  # not worth other bits
assert way_of(team, "not worth it", 100_000) == "staged"
assert trials[8:] == ["staged", "hierarchical", "mpi"]
assert team.lacks_ways == {"nccl"}
team.close()
# As asked for, also of another team.
os.environ["KERAS_HPC_ALLREDUCE"] = "device:0-=hierarchical;network:0-=ring"
teams = [make_team(world, index, 1, 60.0, 30.0) for index in range(2)]
assert [way_of(team, "as asked for", 20_000) for team in teams] == ["hierarchical"] * 2
assert len(trials) == 11
for team in teams:
    team.close()
os.environ["KERAS_HPC_ALLREDUCE"] = "device:0-=mpi;network:0-=ring"
team = make_team(world, 1, 1, 60.0, 30.0)
assert way_of(team, "as asked for", 20_000) == "mpi"
# Values that are rounded between nodes are staged.
assert way_of(team, "rounded", 20_000, wire_dtype="bfloat16") == "staged"
team.close()
world.close()
sys.stdout.write(f"<{rank} is done>\n")
