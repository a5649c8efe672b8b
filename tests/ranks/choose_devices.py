"""Each rank chooses a GPU of a node whose driver is tests/fake_cuda.py's, as a launcher may show them: `SHOWN WISHES
[CALL]`.

SHOWN: for each rank the first GPU that it sees and how many, "0:4,0:4". WISHES: `init(device=)` of each, "auto,cpu,1".
CALL: a function of the driver that fails on rank 1. The libraries: of rank 1, after a comma, another one.
"""

import ctypes
import sys
from types import SimpleNamespace

libraries, shown, wishes, *calls = sys.argv[1:]

from keras_hpc.errors import LaunchError  # noqa: E402
from keras_hpc.job import devices, launch  # noqa: E402

world = launch.connect(None)
fake = ctypes.CDLL(libraries.split(",")[world.rank == 1 and "," in libraries])
for call in calls if world.rank == 1 else ():
    fake.fake_fail(call.encode(), 0)
first, count = map(int, shown.split(",")[world.rank].split(":"))
fake.fake_show(first, count)
wish = wishes.split(",")[world.rank]
backend = SimpleNamespace(sees_gpus=lambda: True)
try:
    device = devices.of_rank(world, backend, int(wish) if wish.isdigit() else wish)
    said = "the CPU" if device is None else f"{device.ordinal} {device.uuid[-2:]} of {device.ranks}"
except LaunchError as error:
    said = f"LaunchError: {error}".replace("\n", " ")
for rank in range(world.size):
    if rank == world.rank:
        sys.stdout.write(f"<{rank}: {said}>\n")
        sys.stdout.flush()
    world.comm.Barrier()
world.close()
