# SPDX-License-Identifier: Apache-2.0
"""Keras' own: `keras.distribution.DataParallel` on JAX, one process for each rank, gloo between them."""

import os

import jax

from benchmarks.peers import common


def main():
    args = common.arguments(__doc__)
    os.environ["KERAS_BACKEND"] = "jax"
    rank, size = common.rank_and_size()
    if size > 1:  # before anything else of JAX
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", size, rank)
    import keras

    if size > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    model = common.keras_model(args)
    common.fit_and_report(model, args)  # each rank passes its own batches: together they are those of all


if __name__ == "__main__":
    main()
