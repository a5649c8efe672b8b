# SPDX-License-Identifier: Apache-2.0
"""Names of Horovod, and what takes their places. After its documentation and examples, version 0.28."""

SAME = {
    "init": "init",
    "shutdown": "finalize",
    "is_initialized": "is_initialized",
    "rank": "rank",
    "size": "size",
    "local_rank": "local_rank",
    "local_size": "local_size",
    "cross_rank": "node",
    "cross_size": "node_count",
    "barrier": "barrier",
    "allreduce": "allreduce",
    "allreduce_": "allreduce",
    "grouped_allreduce": "allreduce",
    "allgather": "allgather",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "broadcast_variables": "broadcast",
    "broadcast_parameters": "broadcast",
    "broadcast_object": "broadcast_object",
    "allgather_object": "allgather_object",
    "reducescatter": "reduce_scatter",
}
OPS = {"Average": "mean", "Sum": "sum", "Min": "min", "Max": "max", "Product": "product"}
# What `from horovod import NAME` may import, and `from horovod.tensorflow import keras`.
MODULES = ("keras", "tensorflow", "torch")
UNNEEDED = ("BroadcastGlobalVariablesCallback", "MetricAverageCallback")
# Of Keras and of others, which run on the first rank alone anyway.
FIRST_RANK_ONLY = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "BackupAndRestore", "WandbMetricsLogger")
# Attributes that choose a GPU, given local_rank().
GPU_CALLS = ("set_visible_devices", "set_device")
COMPRESSION = 'compression is configure_team(0, wire_dtype="float16") here, before the first step'
KNOWN_KEYWORDS = {
    "DistributedOptimizer": {
        "name",
        "op",
        "device_dense",
        "device_sparse",
        "sparse_as_dense",
        "named_parameters",
        "num_groups",
        "groups",
    },
    "DistributedGradientTape": {"op", "device_dense", "device_sparse", "sparse_as_dense"},
}
HARMLESS = {"backward_passes_per_step": "1", "average_aggregated_gradients": None, "gradient_predivide_factor": "1.0"}
BROADCAST = (
    "call keras_hpc.broadcast(model) before the loop: it cannot be called in a compiled function, as Horovod's was here"
)
# Of names that nothing takes the place of: what does the same.
INSTEAD = {
    "run": "start ranks by `keras-hpc run -n 4 SCRIPT`, not from the script",
    "callbacks.LearningRateScheduleCallback": "write it as keras.callbacks.LearningRateScheduler for the epochs after "
    "the warm-up: its rates are those of all ranks together, one rank's times keras_hpc.size()",
}
OPTIMIZER_STATE = "the state of an optimizer of torch.optim is not broadcast: load it on every rank"
