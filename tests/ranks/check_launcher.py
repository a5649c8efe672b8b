"""The launcher itself: as many ranks as asked for, in one MPI job, with the environment that checks rely on."""

import os

RANKS = {"torch": (1, 3)}


def test_ranks_are_one_job():
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD.allgather(MPI.COMM_WORLD.rank)
    assert ranks == list(range(MPI.COMM_WORLD.size))


def test_environment():
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["KERAS_BACKEND"] in {"tensorflow", "jax", "torch"}
