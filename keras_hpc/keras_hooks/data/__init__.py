# SPDX-License-Identifier: Apache-2.0
"""Gives each rank its part of the data that the user hands to `fit`, `evaluate` and `predict`.

`partition` knows which samples are whose; one module for each kind of data carries that out (`arrays`, `tf_datasets`,
`py_datasets`, `torch_loaders`); `sharding` chooses among them and lets the ranks agree; `hooks` and `predict` sit in
Keras.
"""

from __future__ import annotations

from typing import Any

_ADAPTERS = "keras.src.trainers.data_adapters"

# Private Keras names that this package uses, as "module:name", seen in Keras 3.10 to 3.15. `compat` checks them.
REQUIRED = (
    "keras.src.trainers.epoch_iterator:EpochIterator.__init__",
    f"{_ADAPTERS}:is_tf_dataset",
    f"{_ADAPTERS}:is_torch_dataloader",
    f"{_ADAPTERS}.data_adapter:DataAdapter",
    f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter",
    f"{_ADAPTERS}.array_data_adapter:can_convert_arrays",
    f"{_ADAPTERS}.array_slicing:convert_to_sliceable",
    f"{_ADAPTERS}.array_slicing:slice_tensorflow_sparse_wrapper",
    f"{_ADAPTERS}.array_slicing:TensorflowSparseWrapper",
    f"{_ADAPTERS}.data_adapter_utils:get_torch_dataloader",
    f"{_ADAPTERS}.data_adapter_utils:is_tensorflow_sparse",
    f"{_ADAPTERS}.py_dataset_adapter:OrderedEnqueuer",
    f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter._get_iterator",
    f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter._standardize_batch",
    f"{_ADAPTERS}.tf_dataset_adapter:TFDatasetAdapter",
    f"{_ADAPTERS}.torch_data_loader_adapter:TorchDataLoaderAdapter",
    "keras.src.tree:lists_to_tuples",
    "keras.src.tree:map_structure",
    "keras.src.tree:traverse",
)

# Attributes that Keras sets on instances, as "module:class" and the names that its `__init__` must mention.
REQUIRED_ATTRIBUTES = {
    f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter": ("_inputs",),
    f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter": ("enqueuer", "py_dataset"),
    f"{_ADAPTERS}.torch_data_loader_adapter:TorchDataLoaderAdapter": ("_dataloader", "_num_batches"),
}


def install(job: Any, patcher: Any) -> None:
    """Puts sharding into Keras.

    Args:
        job: the running `runtime.Job`.
        patcher: has `patch(owner, attribute, make_replacement)`, which puts
            `make_replacement(original)` in its place until uninstalled.
    """
    from keras_hpc.keras_hooks.data import hooks

    hooks.install(job, patcher)
