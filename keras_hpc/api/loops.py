# SPDX-License-Identifier: Apache-2.0
"""For training loops of the user's own: what `fit` does by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_hpc.job import current


def shard(data: Any, team: int = 0) -> Any:
    """Return this rank's part of a data set, for a training loop of your own.

    All ranks get equally many rows or batches, so that they make equally many steps; the last ones, fewer than there
    are ranks, are left out if they do not go round. What is random in the data set must be the same on all ranks, as it
    is after `init()`.

    Args:
        data: an array or tensor, or a tuple, list or dictionary of them: rows are shared out. A `tf.data.Dataset`, a
            `PyDataset`, a `DataLoader`, or anything else that can be iterated over: its batches are dealt.
        team: number of the team whose ranks share.

    Returns:
        The same kind of thing: arrays, a `tf.data.Dataset`, a `PyDataset`; of a `DataLoader` and of what is iterated
        over an iterable, of a generator a generator.

    Example, on two ranks: of five rows, two for each.

    >>> keras_hpc.allgather_object(keras_hpc.shard(np.arange(5)).tolist())
    [[0, 1], [2, 3]]
    """
    from keras_hpc.keras_hooks.data import loops

    members = current.team_number(team)
    return loops.part_of(data, members.rank, members.size)


@contextlib.contextmanager
def step(samples: Any) -> Iterator[None]:
    """Context for one step of a training loop of your own: gradients count in proportion to the ranks' samples.

    Inside, random layers and the framework's own random functions draw other numbers on each rank. It may stand inside
    of a `tf.function` or `jax.jit`, or around one: JAX then compiles it for each number of samples, and on TensorFlow
    its first call must be in a step, too. Every rank must take part in every step; one without samples passes 0, and
    its gradients are not read.

    ```python
    for x, y in keras_hpc.shard(dataset):
        with keras_hpc.step(samples=len(x)):
            train_step(x, y)
    ```

    Args:
        samples: of this rank in this step, a number or a scalar tensor.
    """
    if not current.active():
        yield
        return
    if current.job().virtual is not None:
        raise ValueError("With init(virtual_ranks=) models are trained by `fit` so far. Received: keras_hpc.step()")
    from keras_hpc.backends.samples import counted
    from keras_hpc.keras_hooks import running
    from keras_hpc.keras_hooks.state import seeds

    with counted(samples) as count, running.running_step(running.Step(None, "loop", False, count)), seeds.of_rank(None):
        yield


def average_statistics(model: Any) -> None:
    """Average over ranks what layers keep of their own data, such as BatchNormalization's statistics. Collective.

    `fit`, `evaluate` and `predict` do it themselves. For training loops of your own, before the model is saved.

    Args:
        model: a model or layer.
    """
    from keras_hpc.keras_hooks.state import variables

    variables.average(current.team_of(model), [*variables.per_rank_state(model), *variables.common_buffers(model)])


def keep_local(layer: Any) -> None:
    """Let a layer's variables be each rank's own: neither their values nor their gradients are shared.

    Call it on every rank, before the first step. `check_replicas` leaves them out; rank 0 saves its own.

    Args:
        layer: a Keras layer.

    Raises:
        TypeError: it is no layer.
        ValueError: ranks are not what variables belong to: with `init(virtual_ranks=)` or `init(spatial=)`.
    """
    import keras

    if not isinstance(layer, keras.Layer):
        raise TypeError(f"`layer` has the variables. Expected a Keras layer. Received: {layer!r}")
    job = current.job()
    if job.virtual is not None or job.group is not None:
        raise ValueError(
            "keep_local makes variables of each rank, where a rank computes what is its own. Expected init() without "
            f"{'virtual_ranks' if job.virtual is not None else 'spatial'}. Received: layer `{layer.name}`"
        )
    job.known.keep_local(layer)
