# SPDX-License-Identifier: Apache-2.0
"""Arrays: NumPy, pandas, SciPy sparse, and the tensors of TensorFlow, JAX and PyTorch, in any nested structure."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from keras.src import tree
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from keras_hpc.keras_hooks.data.partition import Partition, Passes, Place


class ShardedArrays(DataAdapter):  # type: ignore[misc]
    """This rank's part of every global batch of arrays.

    Args:
        place: this rank's place.
        x, y, sample_weight, class_weight, batch_size, steps_per_epoch, shuffle: as in `Model.fit`.
    """

    def __init__(self, place: Place, x: Any, y: Any, sample_weight: Any, class_weight: Any, batch_size: int | None,
                 steps_per_epoch: int | None, shuffle: bool | str) -> None:  # fmt: skip
        # Keras' own adapter checks the arguments and packs them; only the order of the rows is ours.
        self._inputs = ArrayDataAdapter(x, y, sample_weight=sample_weight, class_weight=class_weight)._inputs
        arrays = [a for a in tree.flatten(self._inputs) if a is not None]
        samples = int(arrays[0].shape[0])
        if samples == 0:
            raise ValueError(f"Cannot share out an empty data set. Received: arrays of shape {tuple(arrays[0].shape)}.")
        if batch_size:
            batch = place.global_batch(batch_size)
        else:  # As in Keras, the number of steps then says how large a batch is: here that of all ranks together.
            batch = -(-samples // steps_per_epoch) if steps_per_epoch else place.global_batch(32)
        self.partition = Partition(samples, batch, place)
        self.shuffle = shuffle
        self.seed = 0
        self.passes = Passes()
        self.step_size = batch
        self.may_be_empty = self.partition.may_be_empty
        self.fingerprint = [
            "arrays",
            samples,
            batch,
            str(shuffle),
            [[list(a.shape[1:]), str(_dtype(a))] for a in arrays],
        ]

    @property
    def summary(self) -> str:
        """What was decided, in a few words."""
        p = self.partition
        return (
            f"{p.samples} samples, about {-(-p.samples // p.place.size)} per rank, global batch {p.global_batch} "
            f"({-(-p.global_batch // p.place.size)} per rank), {p.steps} steps an epoch"
        )

    def content(self) -> int:
        """Returns a check sum of a few rows, to find out whether ranks hold the same data."""
        arrays = [a for a in tree.flatten(self._inputs) if isinstance(a, np.ndarray) and a.dtype != object]
        rows = [0, self.partition.samples // 2, -1]
        return functools.reduce(lambda total, a: zlib.crc32(np.ascontiguousarray(a[rows]).tobytes(), total), arrays, 0)

    def _order(self, epoch: int) -> np.ndarray:
        return self.partition.order(self.shuffle, self.seed, epoch)

    def _batches(self, target: str, convert: str) -> Iterator[Any]:
        columns = array_slicing.convert_to_sliceable(self._inputs, target_backend=target)
        epoch, first = self.passes.begin()
        order = self._order(epoch) if self.shuffle else None
        for step in range(first, self.partition.steps):
            rows: Any = slice(*self.partition.bounds(step))
            rows = rows if order is None else order[rows]
            yield tree.map_structure(lambda c: None if c is None else getattr(c, convert)(c[rows]), columns)  # noqa: B023
            # Only now: Keras may look at the first batch of a pass that it then drops, to build the model, and whether
            # it does can differ between ranks.
            self.passes.next = epoch + 1

    def get_numpy_iterator(self) -> Iterator[Any]:
        """One pass over this rank's batches."""
        return self._batches("numpy", "convert_to_numpy")

    def get_jax_iterator(self) -> Iterator[Any]:
        """One pass over this rank's batches."""
        return self._batches("jax", "convert_to_jax_compatible")

    def get_torch_dataloader(self) -> Any:
        """One pass over this rank's batches."""
        return data_adapter_utils.get_torch_dataloader(self._batches("torch", "convert_to_torch_compatible"))

    def get_tf_dataset(self) -> Any:
        """This rank's batches as a pipeline: Python is called once a pass, for its order; rows are gathered in C++."""
        import tensorflow as tf

        take = _tensorflow_gather(self._inputs)
        width = np.diff(self.partition.place.part(self.partition.global_batch))[0]

        def indices() -> tuple[np.ndarray, np.ndarray]:
            epoch, first = self.passes.begin()
            self.passes.next = epoch + 1
            full, tail = self.partition.mine(self._order(epoch))
            return full[first:], tail

        def steps(full: Any, tail: Any) -> Any:
            batches = tf.data.Dataset.from_tensor_slices(tf.ensure_shape(full, [None, width]))
            if self.partition.steps > self.partition.full_steps:
                batches = batches.concatenate(tf.data.Dataset.from_tensors(tf.ensure_shape(tail, [None])))
            return batches

        orders = tf.data.Dataset.range(1).map(lambda _: tf.numpy_function(indices, [], [tf.int64, tf.int64]))
        dataset = orders.flat_map(steps).map(take)
        options = tf.data.Options()
        # Nor is there anything to tune, and the thread that would can delay each pass by 0.3 s on a rank with one core.
        options.autotune.enabled = False
        # Rewriting this graph gains nothing, and would copy the arrays it holds.
        options.experimental_optimization.apply_default_optimizations = False
        return dataset.with_options(options).prefetch(2)

    def on_epoch_end(self) -> None:
        """Keras calls it."""
        self.passes.end()

    @property
    def num_batches(self) -> int:
        """Steps in a pass."""
        return self.partition.steps

    @property
    def batch_size(self) -> int:
        """Samples in a step on the rank that has most."""
        return -(-self.partition.global_batch // self.partition.place.size)

    @property
    def has_partial_batch(self) -> bool:
        """Whether a smaller last step follows."""
        return self.partition.steps > self.partition.full_steps

    @property
    def partial_batch_size(self) -> int | None:
        """Samples of this rank in the smaller last step."""
        start, stop = self.partition.bounds(self.partition.steps - 1)
        return stop - start if self.has_partial_batch else None


def _dtype(array: Any) -> Any:
    return array.dtype if hasattr(array, "dtype") else list(map(str, array.dtypes))


def _tensorflow_gather(inputs: Any) -> Callable[[Any], Any]:
    """Returns a function from row numbers to these rows of `inputs`."""
    import tensorflow as tf

    sparse = array_slicing.TensorflowSparseWrapper
    columns = tree.lists_to_tuples(array_slicing.convert_to_sliceable(inputs, target_backend="tensorflow"))

    def is_structure(x: Any) -> bool:
        return isinstance(x, (list, tuple, dict)) and not isinstance(x, sparse)

    # Tensors: a NumPy array used inside a pipeline's function would become a constant of its graph, 2 GB at most.
    columns = tree.traverse(
        lambda c: None if is_structure(c) else tf.convert_to_tensor(c) if isinstance(c, np.ndarray) else c, columns
    )

    def gather(column: Any, rows: Any) -> Any:
        if is_structure(column):
            return None
        if isinstance(column, sparse):
            return array_slicing.slice_tensorflow_sparse_wrapper(column, rows)
        return column if column is None else tf.gather(column, rows)

    return lambda rows: tree.traverse(lambda column: gather(column, rows), columns)
