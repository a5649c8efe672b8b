"""How many threads communicate, where nobody has said so."""

import pytest

from keras_hpc.job import launch


@pytest.mark.parametrize(
    ("nodes", "cores", "fewest", "teams", "threads"),
    [
        ([0], 64, 64, 1, 0),
        ([0, 0], 2, 2, 1, 0),  # ranks fill the cores
        ([0, 0], 4, 4, 1, 1),
        ([0, 1], 4, 4, 1, 1),
        ([0, 1], 64, 16, 1, 2),  # all ranks alike, whatever the others' nodes have
        ([0, 1, 2], 32, 32, 1, 4),
        ([0, 1], 256, 256, 1, 4),
        ([0, 1], 64, 64, 2, 2),  # of each team
        ([0, 1], 64, 64, 8, 1),
        ([0, 0, 1], 64, 64, 1, 1),  # its ranks share the work of a node already
    ],
)
def test_threads_of_a_team(nodes, cores, fewest, teams, threads):
    world = launch.World(None, 0, len(nodes), nodes)
    assert launch.threads_per_team(world, "auto", cores, fewest, teams, needs_thread=False) == threads
    assert launch.threads_per_team(world, 3, cores, fewest, teams, needs_thread=True) == 3


@pytest.mark.parametrize(
    ("nodes", "fewest", "teams", "threads"),
    [([0, 0], 16, 1, 4), ([0, 0], 2, 1, 1), ([0, 0, 1], 12, 1, 3), ([0, 1], 64, 2, 2), ([0], 64, 1, 0)],
)
def test_threads_of_a_team_on_gpus(nodes, fewest, teams, threads):
    world = launch.World(None, 0, len(nodes), nodes)
    options = {"needs_thread": True, "on_gpus": True}
    assert launch.threads_per_team(world, "auto", 99, fewest, teams, **options) == threads
    assert launch.threads_per_team(world, 1, 99, fewest, teams, **options) == 1


def test_a_backend_that_needs_a_thread_has_one():
    world = launch.World(None, 0, 2, [0, 0])
    assert launch.threads_per_team(world, "auto", 2, 2, 1, needs_thread=True) == 1
    with pytest.raises(ValueError, match="at least 1"):
        launch.threads_per_team(world, 0, 2, 2, 1, needs_thread=True)
