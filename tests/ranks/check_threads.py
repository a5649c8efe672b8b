# SPDX-License-Identifier: Apache-2.0
"""Ranks of a node share its cores, unless the user has set the numbers of threads."""

import os

NAMES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC")
for name in NAMES:  # what the launcher of the tests sets
    os.environ.pop(name, None)

import keras  # noqa: E402

import keras_hpc  # noqa: E402
from keras_hpc.job import current  # noqa: E402

RANKS = {"tensorflow": (2,), "jax": (2,)}
ALONE = True


def test_init_gives_each_rank_its_share():
    keras_hpc.init()
    job = current.job()
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // job.size - job.teams[0].native.threads)
    assert os.environ["OMP_NUM_THREADS"] == str(share)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        assert tf.config.threading.get_intra_op_parallelism_threads() == share
        assert tf.config.threading.get_inter_op_parallelism_threads() == max(2, share)
    else:
        assert os.environ["NPROC"] == str(share)
    keras_hpc.finalize()


def test_what_is_set_stays_and_what_has_started_is_said():
    keras.ops.add(1, 1)  # the backend has started
    os.environ["OMP_NUM_THREADS"] = "7"
    os.environ.pop("NPROC", None)
    from keras_hpc import backends
    from keras_hpc.job.resources import share_cores

    text = share_cores(8, 2, 1, backends.current().limit_threads)
    assert text.startswith("2 ranks on 8 cores of this node")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "OMP" not in text
    if keras.backend.backend() == "jax":
        assert "could not set XLA's threads: the backend had started" in text
    assert share_cores(4, 4, 1, lambda count: ([f"{count} threads"], [])).endswith("set 1 threads")
    assert share_cores(16, 2, 2, lambda count: ([f"{count} threads"], [])).endswith("set 6 threads")
