# SPDX-License-Identifier: Apache-2.0
"""Arrays: NumPy, pandas, SciPy sparse, and the tensors of TensorFlow, JAX and PyTorch, in any nested structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import xxhash
from keras import tree

from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.data.partition import Partition, Passes, Shard

DataAdapter = keras_private.adapter("data_adapter:DataAdapter")
_KerasAdapter = keras_private.adapter("array_data_adapter:ArrayDataAdapter")
_to_sliceable = keras_private.adapter("array_slicing:convert_to_sliceable")
_torch_loader = keras_private.adapter("data_adapter_utils:get_torch_dataloader")
_DIGEST_BYTES = 1 << 30  # that are read for a digest; of larger arrays, rows that are evenly spread
_DIGEST_ROWS = 4096


class ShardedArrays(DataAdapter):  # type: ignore[misc, valid-type]
    """This rank's part of every global batch of arrays.

    Args:
        shard: where this rank stands.
        x, y, sample_weight, class_weight, batch_size, steps_per_epoch, shuffle: as in `Model.fit`.
    """

    def __init__(self, shard: Shard, x: Any, y: Any, sample_weight: Any, class_weight: Any, batch_size: int | None,
                 steps_per_epoch: int | None, shuffle: bool | str) -> None:  # fmt: skip
        # Keras' own adapter checks the arguments and packs them; only the order of the rows is ours.
        self._inputs = _KerasAdapter(x, y, sample_weight=sample_weight, class_weight=class_weight)._inputs
        arrays = [a for a in tree.flatten(self._inputs) if a is not None]
        samples = int(arrays[0].shape[0])
        if samples == 0:
            raise ValueError(f"Cannot share out an empty data set. Received: arrays of shape {tuple(arrays[0].shape)}.")
        if batch_size:
            batch = shard.global_batch(batch_size)
        else:  # As in Keras, the number of steps then says how large a batch is: here that of all ranks together.
            batch = -(-samples // steps_per_epoch) if steps_per_epoch else shard.global_batch(32)
        self.partition = Partition(samples, batch, shard)
        self.shuffle = shuffle
        self.seed = 0
        self.passes = Passes()
        self.step_size = batch
        self.turns = shard.turns
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
            f"{p.samples} samples, about {-(-p.samples // p.shard.size)} per rank, global batch {p.global_batch} "
            f"({-(-p.global_batch // p.shard.size)} per rank), {p.steps} steps an epoch"
        )

    def content(self) -> str:
        """Return a digest, to find out whether ranks hold the same data."""
        return digest(self._inputs)

    def rows(self, count: int) -> Any:
        """Return the first rows of what the model is called with."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(self._inputs)
        return tree.map_structure(lambda c: np.asarray(c[:count]), x)

    def _order(self, epoch: int) -> np.ndarray:
        return self.partition.order(self.shuffle, self.seed, epoch)

    def _batches(self, target: str, convert: str) -> Iterator[Any]:
        columns = _to_sliceable(self._inputs, target_backend=target)
        epoch, first = self.passes.begin()
        order = self._order(epoch) if self.shuffle else None
        turns = (bounds for step in range(first, self.partition.steps) for bounds in self.partition.turns(step))
        for bounds in turns:
            rows: Any = slice(*bounds)
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
        return _torch_loader(self._batches("torch", "convert_to_torch_compatible"))

    def get_tf_dataset(self) -> Any:
        """This rank's batches as a pipeline: Python is called once a pass, for its order; rows are gathered in C++."""
        import tensorflow as tf

        take = _tensorflow_gather(self._inputs)
        width = np.diff(self.partition.shard.part(self.partition.global_batch))[0]

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

        def turns() -> tuple[np.ndarray, np.ndarray]:
            epoch, first = self.passes.begin()
            self.passes.next = epoch + 1
            bounds = [b for step in range(first, self.partition.steps) for b in self.partition.turns(step)]
            return self._order(epoch), np.array(bounds, np.int64).reshape(-1, 2)

        def cut(order: Any, bounds: Any) -> Any:
            bounds = tf.data.Dataset.from_tensor_slices(tf.ensure_shape(bounds, [None, 2]))
            return bounds.map(lambda b: tf.ensure_shape(order, [None])[b[0] : b[1]])

        asked, made = (turns, cut) if self.partition.shard.turns > 1 else (indices, steps)
        orders = tf.data.Dataset.range(1).map(lambda _: tf.numpy_function(asked, [], [tf.int64, tf.int64]))
        dataset = orders.flat_map(made).map(take)
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
        return -(-self.partition.global_batch // self.partition.shard.size)

    @property
    def has_partial_batch(self) -> bool:
        """Whether a smaller last step follows."""
        return self.partition.steps > self.partition.full_steps

    @property
    def partial_batch_size(self) -> int | None:
        """Samples of this rank in the smaller last step."""
        start, stop = self.partition.bounds(self.partition.steps - 1)
        return stop - start if self.has_partial_batch else None


def digest(arrays: Any) -> str:
    """Return a digest of nested arrays or tensors, of rows that are evenly spread if they are large or on disk."""
    found = xxhash.xxh3_128()
    leaves = [leaf for leaf in tree.flatten(arrays) if leaf is not None]
    total = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
    for leaf in leaves:
        if hasattr(leaf, "detach"):  # PyTorch
            leaf = leaf.detach().cpu()
            leaf = leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf
        if hasattr(leaf, "values") and hasattr(leaf, "dtypes"):  # pandas
            leaf = leaf.values
        if not isinstance(leaf, np.ndarray) and (hasattr(leaf, "tocsr") or not hasattr(leaf, "__array__")):
            continue  # sparse
        if (total > _DIGEST_BYTES or isinstance(leaf, np.memmap)) and len(leaf) > _DIGEST_ROWS:
            leaf = leaf[:: -(-len(leaf) // _DIGEST_ROWS)]
        array = np.ascontiguousarray(leaf)
        if array.dtype.hasobject:
            found.update(repr(array.tolist()).encode())
        else:
            found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _dtype(array: Any) -> Any:
    return array.dtype if hasattr(array, "dtype") else list(map(str, array.dtypes))


def _tensorflow_gather(inputs: Any) -> Callable[[Any], Any]:
    """Return a function from row numbers to these rows of `inputs`."""
    import tensorflow as tf

    sparse = keras_private.adapter("array_slicing:TensorflowSparseWrapper")
    take_sparse = keras_private.adapter("array_slicing:slice_tensorflow_sparse_wrapper")
    columns = tree.lists_to_tuples(_to_sliceable(inputs, target_backend="tensorflow"))

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
            return take_sparse(column, rows)
        return column if column is None else tf.gather(column, rows)

    return lambda rows: tree.traverse(lambda column: gather(column, rows), columns)
