# SPDX-License-Identifier: Apache-2.0
"""`tf.data.Dataset`: its batches are dealt to the ranks, or each is cut among them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.data import tf_caches
from keras_hpc.keras_hooks.data.arrays import digest
from keras_hpc.keras_hooks.data.partition import Shard
from keras_hpc.keras_hooks.data.rows import UNEQUAL_ROWS

TFDatasetAdapter = keras_private.adapter("tf_dataset_adapter:TFDatasetAdapter")


class ShardedTFDataset(TFDatasetAdapter):  # type: ignore[misc, valid-type]
    """This rank's part of a `tf.data.Dataset`, for any backend: each rank runs the whole pipeline."""

    shuffle = False
    _dataset: Any

    def __init__(self, shard: Shard, dataset: Any, class_weight: Any = None, steps: int | None = None) -> None:
        spec, cardinality = dataset.element_spec, int(dataset.cardinality())
        if cardinality == 0:
            raise ValueError(f"Cannot share out an empty data set. Received: {dataset}.")
        _check_batched(spec)
        self.first = FirstBatch()
        may_go_on = cardinality < 0 or _repeats_an_order(dataset)
        self._has_an_end = steps is not None and may_go_on
        read = _with_an_end(dataset, steps * shard.steps_apart) if steps is not None and may_go_on else dataset
        super().__init__(part_of(self.first.noted_in(read), shard), class_weight=class_weight)
        self._given = dataset, class_weight
        self.shard = shard
        self.step_size = shard.steps_apart
        self.turns = shard.turns
        self._steps = shard.steps(cardinality) if cardinality > 0 else None
        # A known number of batches (-1: endless, -2: unknown) tells whether the last step has one for every rank.
        self.may_be_empty = (
            shard.batch == "global" or cardinality == -2 or (cardinality > 0 and cardinality % shard.size > 0)
        )
        self.fingerprint = ["tf.data", cardinality, str(spec)]
        self._batches = {-1: "endless", -2: "unknown number of"}.get(cardinality, str(cardinality))
        self.unseeded = shuffles_without_seed(dataset)
        self.unordered = _has_no_order(dataset)
        self.draws_ahead = steps is not None and _draws_ahead(_without_prefetch(dataset))
        self._content = digest([np.zeros(0), *constants(dataset)])
        self.unfinished = tf_caches.unfinished(dataset)

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """Inside, who takes a first batch reads the first one of all, and no other, as Keras does to build a model.

        To read as far as this rank's first one, or ahead, would fill the user's `cache()`, begin another pass of a
        `shuffle`, or draw from NumPy, on some ranks and not on others.
        """
        dataset, class_weight = self._given
        first = dataset = _without_prefetch(dataset)
        if self.shard.batch == "global":
            first = _without_prefetch(part_of(dataset, self.shard))
        weighted = TFDatasetAdapter(first, class_weight=class_weight)._dataset
        usual: Any = self._dataset, self.turns
        self._dataset, self.turns = without_reading_ahead(weighted), 1
        try:
            yield
        finally:
            self._dataset, self.turns = usual

    @property
    def summary(self) -> str:
        """What was decided, in a few words."""
        how = "dealt to ranks one by one" if self.shard.batch == "local" else "each cut among the ranks"
        steps = "unknown" if self.num_batches is None else self.num_batches
        return f"tf.data.Dataset, {self._batches} batches, {how}, steps an epoch: {steps}"

    @property
    def num_batches(self) -> int | None:
        """Steps in a pass; None: nobody knows."""
        batches: int | None = super().num_batches if self.turns == 1 and not self._has_an_end else self._steps
        return batches

    def content(self) -> str:
        """Return a digest of the tensors and seeds in the pipeline, to find out whether ranks hold the same data."""
        return self._content


class FirstBatch:
    """What a pipeline has given first, for ranks to compare: the integers, texts and flags in it.

    It is noted where each rank reads it anyhow. Numbers of other kinds, and of images, may be augmented by several
    threads, which draw in an order of their own on each rank.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        with tf.device("CPU"):
            self._digest = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.was_compared = False

    def digest(self) -> int:
        """Return the digest of the latest pass; 0: there was none."""
        return int(self._digest.numpy())

    def noted_in(self, dataset: Any) -> Any:
        """Return the same pipeline, which notes what it gives first."""
        import tensorflow as tf

        def note(element: Any) -> Any:
            leaves = [x for x in tf.nest.flatten(element, expand_composites=True) if x is not None]
            kept = [
                x for x in leaves if x.dtype in (tf.string, tf.bool) or (x.dtype.is_integer and x.dtype != tf.uint8)
            ]
            texts = [tf.io.serialize_tensor(x) for x in kept]
            self._digest.assign(tf.strings.to_hash_bucket_fast(tf.strings.join(["", *texts]), 2**62))
            return True

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def look(number: Any, element: Any) -> Any:
            tf.cond(number == 0, lambda: note(element), lambda: True)
            return element

        return dataset.enumerate().map(look)


def part_of(dataset: Any, shard: Shard) -> Any:
    """Return this rank's part of `dataset`; ranks get the same number of batches, some of which may have no rows."""
    import tensorflow as tf

    dataset = in_order(dataset)
    if shard.turns > 1:
        return _in_turns(dataset, shard)
    if shard.batch == "global":
        structured = isinstance(dataset.element_spec, tuple)
        parts = dataset.map(lambda *element: _part(element if structured else element[0], shard))
        return parts.prefetch(tf.data.AUTOTUNE)
    # See `partition.deal`: `rank` empty batches behind the others give each rank its full number of steps and never one
    # more, so nobody has to know how many batches there are.
    if shard.rank and not (dataset.cardinality() >= 0 and dataset.cardinality() % shard.size == 0):
        empty = tf.data.Dataset.range(shard.rank).map(lambda _: tf.nest.map_structure(_empty, dataset.element_spec))
        dataset = dataset.concatenate(empty)
    return dataset.shard(shard.size, shard.rank)


def _in_turns(dataset: Any, shard: Shard) -> Any:
    """Return the parts of several neighbouring ranks, of each step one after the other: the pipeline runs once."""
    import tensorflow as tf

    structured = isinstance(dataset.element_spec, tuple)
    if shard.batch == "global":

        def cut(*element: Any) -> Any:
            parts = [_part(element if structured else element[0], one) for one in shard.each]
            made = [tf.data.Dataset.from_tensors(part) for part in parts]
            return functools.reduce(lambda before, after: before.concatenate(after), made)

        return dataset.flat_map(cut).prefetch(tf.data.AUTOTUNE)
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        raise ValueError(
            "With init(virtual_ranks=) the number of batches must be known, as the last step may be short of some. "
            "Expected `dataset.apply(tf.data.experimental.assert_cardinality(n))`. Received: a tf.data.Dataset of "
            "unknown length"
        )
    if cardinality > 0 and cardinality % shard.size:
        missing = tf.data.Dataset.range(-cardinality % shard.size)
        dataset = dataset.concatenate(missing.map(lambda _: tf.nest.map_structure(_empty, dataset.element_spec)))
    first, end = shard.rank, shard.rank + shard.turns
    numbered = dataset.enumerate().filter(lambda i, _: (i % shard.size >= first) & (i % shard.size < end))
    return numbered.map(lambda _, element: element)


def _without_prefetch(dataset: Any) -> Any:
    """Return what a pipeline prefetches at its end."""
    while "Prefetch" in type(dataset).__name__:
        (dataset,) = dataset._inputs()
    return dataset


def _with_an_end(dataset: Any, batches: int) -> Any:
    """Return a pipeline that ends where nothing more is needed of it, though it prefetches.

    A `shuffle` that is repeated begins another order where it is read past its end, by chance on some ranks: the next
    one who reads it would then get other samples on each.
    """
    import tensorflow as tf

    kept = _without_prefetch(dataset)
    bounded = kept.take(batches)
    return bounded if kept is dataset else bounded.prefetch(tf.data.AUTOTUNE)


def _draws_ahead(dataset: Any) -> bool:
    """Whether what may read ahead comes behind a `repeat` of a `shuffle`."""
    name = type(dataset).__name__
    ahead = "Parallel" in name or "Prefetch" in name or name == "_MapDataset"
    return (ahead and _repeats_an_order(dataset)) or any(map(_draws_ahead, dataset._inputs()))


def _repeats_an_order(dataset: Any) -> bool:
    repeats = "Repeat" in type(dataset).__name__ and shuffles(dataset)
    return repeats or any(map(_repeats_an_order, dataset._inputs()))


def without_reading_ahead(dataset: Any) -> Any:
    """Return a pipeline that ends without a prefetch, also without those that TensorFlow adds."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return _without_prefetch(dataset).with_options(options)


def in_order(dataset: Any) -> Any:
    """Return a pipeline whose order is the same on every rank, where options let it give first what is ready first."""
    import tensorflow as tf

    if dataset.options().deterministic is not False:
        return dataset
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def _has_no_order(dataset: Any) -> bool:
    """Whether a `map` or `batch` in the pipeline says that it has none, which no option changes.

    An `interleave` that says so cannot be seen from outside.
    """
    return getattr(dataset, "_deterministic", None) == "false" or any(map(_has_no_order, dataset._inputs()))


def shuffles_without_seed(dataset: Any) -> bool:
    """Whether a `shuffle` somewhere in the pipeline has no seed, so that every rank has its own order.

    Random choices inside the user's own functions (`map`, generators) cannot be seen from outside.
    """
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if "Shuffle" in type(dataset).__name__ and all(s is not None and int(s) == 0 for s in seeds):
        return True
    return any(map(shuffles_without_seed, dataset._inputs()))


def constants(dataset: Any) -> list[Any]:
    """Return the tensors that a pipeline begins with, and the seeds of its shuffles. Reads no element of it."""
    held = [*(getattr(dataset, "_tensors", None) or []), getattr(dataset, "_tensor", None)]
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    # Not what is ragged or sparse, which a pipeline holds as it likes.
    plain = [x for x in (*held, *seeds) if hasattr(x, "numpy") and x.dtype.is_numpy_compatible]
    found = [np.asarray(x) for x in plain]
    return found + [x for source in dataset._inputs() for x in constants(source)]


def shuffles(dataset: Any) -> bool:
    """Whether there is a `shuffle` somewhere in the pipeline. Each new iterator then has another order."""
    return _has(dataset, "Shuffle")


def notices_reading(dataset: Any) -> bool:
    """Whether to read a pipeline changes what the next one who reads it is given, or what is in its cache."""
    return _has(dataset, "Shuffle", "FlatMap", "Random", "Cache")  # a generator of the user's is read in a FlatMap


def _has(dataset: Any, *kinds: str) -> bool:
    """Whether there is a step of one of these kinds somewhere in the pipeline."""
    return any(kind in type(dataset).__name__ for kind in kinds) or any(_has(one, *kinds) for one in dataset._inputs())


def _check_batched(spec: Any) -> None:
    import tensorflow as tf

    for leaf in tf.nest.flatten(spec):
        if getattr(leaf, "shape", None) is not None and leaf.shape.rank == 0:
            raise ValueError(
                "The elements of a tf.data.Dataset must be batches, so that they can be shared out. "
                f"Call `.batch()` on it. Received: elements of {spec}."
            )


def _part(element: Any, shard: Shard) -> Any:
    import tensorflow as tf

    first, *others = (x for x in tf.nest.flatten(element) if x is not None)
    start, stop = shard.part(_rows(first) if first.shape[0] is None else first.shape[0])

    def cut(x: Any) -> Any:
        if isinstance(x, tf.SparseTensor):
            rest = x.dense_shape[1:]
            return tf.sparse.slice(x, tf.concat([[start], 0 * rest], 0), tf.concat([[stop - start], rest], 0))
        return None if x is None else x[start:stop]

    with tf.control_dependencies([tf.debugging.assert_equal(_rows(x), _rows(first), UNEQUAL_ROWS) for x in others]):
        return tf.nest.map_structure(cut, element)


def _rows(tensor: Any) -> Any:
    """Return the number of rows as a tensor."""
    import tensorflow as tf

    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int64)
    return tensor.dense_shape[0] if isinstance(tensor, tf.SparseTensor) else tf.shape(tensor, tf.int64)[0]


def _empty(spec: Any) -> Any:
    """Return a value of `spec` without rows. Other axes of unknown length get the length 1."""
    import tensorflow as tf

    if isinstance(spec, tf.RaggedTensorSpec):
        inner = tuple(1 if n is None else n for n in spec.shape[1 + spec.ragged_rank :])
        return tf.ragged.constant([], spec.dtype, spec.ragged_rank, inner, row_splits_dtype=spec.row_splits_dtype)
    if not isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec)):
        return None
    shape = [0, *(1 if n is None else n for n in spec.shape[1:])]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    return tf.zeros(shape, spec.dtype)
