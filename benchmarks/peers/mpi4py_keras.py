# SPDX-License-Identifier: Apache-2.0
"""What people write themselves: Keras' `fit` on TensorFlow, each gradient averaged by mpi4py's Allreduce."""

import os

import numpy as np
import tensorflow as tf

from benchmarks.peers import common


def averaged(optimizer, comm):
    """Lets an optimizer apply the mean of the ranks' gradients."""

    def mean(*gradients):
        results = []
        for gradient in gradients:  # in the same order on every rank
            result = np.empty_like(gradient)
            comm.Allreduce(np.ascontiguousarray(gradient), result)
            result /= comm.size
            results.append(result)
        return results

    original = optimizer.apply

    def apply(gradients, variables=None):
        reduced = tf.numpy_function(mean, gradients, [g.dtype for g in gradients])
        for now, before in zip(reduced, gradients, strict=True):
            now.set_shape(before.shape)
        return original(reduced, variables)

    optimizer.apply = apply


def main():
    args = common.arguments(__doc__)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    _, size = common.rank_and_size()
    model = common.keras_model(args)
    if size > 1:
        from mpi4py import MPI

        for variable in model.variables:
            value = np.ascontiguousarray(variable.numpy())
            MPI.COMM_WORLD.Bcast(value)
            variable.assign(value)
        averaged(model.optimizer, MPI.COMM_WORLD)
    common.fit_and_report(model, args)


if __name__ == "__main__":
    main()
