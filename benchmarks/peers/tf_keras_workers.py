# SPDX-License-Identifier: Apache-2.0
"""Keras 2 as tf-keras, with TensorFlow's MultiWorkerMirroredStrategy over gRPC on several ranks."""

import json
import os
import sys

import tensorflow as tf
import tf_keras

from benchmarks.peers import common

sys.modules["keras"] = tf_keras  # the networks are written for either


def main():
    args = common.arguments(__doc__)
    rank, size = common.rank_and_size()
    if size == 1:
        common.fit_and_report(common.keras_model(args), args)
        return
    workers = {"cluster": {"worker": os.environ["ADDRESSES"].split(",")}, "task": {"type": "worker", "index": rank}}
    os.environ["TF_CONFIG"] = json.dumps(workers)
    ring = tf.distribute.experimental.CommunicationImplementation.RING  # the one over gRPC
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model = common.keras_model(args)
    arrays = common.batches(args)

    def data(steps):
        def of_worker(_):
            return tf.data.Dataset.from_tensor_slices(arrays).batch(args.batch_size).take(steps)

        return {"x": strategy.distribute_datasets_from_function(of_worker), "steps_per_epoch": steps}

    common.fit_and_report(model, args, data)


if __name__ == "__main__":
    main()
