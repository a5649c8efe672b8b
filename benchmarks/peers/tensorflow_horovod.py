# SPDX-License-Identifier: Apache-2.0
"""A plain TensorFlow step, its gradients averaged by Horovod's DistributedGradientTape on several ranks."""

import os
import time

import tensorflow as tf

from benchmarks.peers import common


def step_of(model, tape_around):
    """Returns a function that trains a compiled model on the next batch of an iterator.

    Args:
        model: of Keras.
        tape_around: a function from a tape to the one that gives the gradients.
    """
    weights = [variable.value for variable in model.trainable_variables]

    @tf.function
    def step(iterator):
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        gradients = tape_around(tape).gradient(loss, weights)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def main():
    args = common.arguments(__doc__)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    _, size = common.rank_and_size()
    model = common.keras_model(args)
    model.optimizer.build(model.trainable_variables)
    tape_around = lambda tape: tape  # noqa: E731
    if size > 1:
        import horovod.tensorflow as hvd

        hvd.init()
        hvd.broadcast_variables([v.value for v in model.variables + model.optimizer.variables], root_rank=0)
        tape_around = hvd.DistributedGradientTape
    step = step_of(model, tape_around)
    samples = tf.data.Dataset.from_tensor_slices(common.batches(args)).batch(args.batch_size).prefetch(2)
    for _ in range(2):  # as fit_and_report
        seconds = []
        iterator = iter(samples)
        for _ in range(args.steps):
            begin = time.perf_counter()
            step(iterator).numpy()
            seconds.append(time.perf_counter() - begin)
    common.report(seconds)


if __name__ == "__main__":
    main()
