# SPDX-License-Identifier: Apache-2.0
"""Jobs of virtual ranks on several numbers of ranks, and whether they end alike: what checks of them share."""

import hashlib

import keras

import keras_hpc

VIRTUAL = 8


def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def jobs():
    """Yields what `init` takes, in jobs of all ranks, and of all but the last one beside that one alone."""
    keras_hpc.finalize()
    for alone in (False, True):
        comm = world().Split(int(alone and world().rank == world().size - 1), world().rank)
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        yield {"comm": comm, "device": "cpu"}
        keras_hpc.finalize()
        world().Barrier()
        comm.Free()


def digest(model):
    values = [keras.ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def assert_alike(results):
    """Of all jobs, on all ranks of the world."""
    everyone = world().allgather(results)
    assert all(result == everyone[0][0] for of_rank in everyone for result in of_rank), everyone


def same_bits(train, virtual=VIRTUAL, **options):
    """Trains with virtual ranks on several numbers of ranks; what `train` returns must be the same."""
    results = []
    for arguments in jobs():
        keras_hpc.init(**arguments, virtual_ranks=virtual, **options)
        results.append(train())
    assert_alike(results)
    return results[0]
