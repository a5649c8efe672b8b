# SPDX-License-Identifier: Apache-2.0
"""Chooses how to share out what the user gave to Keras, and lets the ranks agree on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_hpc.job import current, log
from keras_hpc.job.current import Job
from keras_hpc.job.team import Team
from keras_hpc.keras_hooks import building, keras_private, running
from keras_hpc.keras_hooks.data import tf_caches
from keras_hpc.keras_hooks.data.partition import Shard
from keras_hpc.keras_hooks.state import seeds

_can_convert_arrays = keras_private.adapter("array_data_adapter:can_convert_arrays")
_is_tf_dataset = keras_private.adapter(":is_tf_dataset")
_is_torch_dataloader = keras_private.adapter(":is_torch_dataloader")
_get_data_adapter = keras_private.adapter(":get_data_adapter")
_SAME = (
    "If all are to hold the same, make them after keras_hpc.init(), and draw what is random from `random`, "
    "`np.random`, Keras, the framework, or from a generator with a seed; np.random.default_rng() without one is "
    "another on each rank."
)
_HINT = f"If each rank reads its own part of the data, call keras_hpc.init(shard=False). {_SAME}"


def adapter_for(job: Job, team: Team, call: running.Call, arguments: dict[str, Any]) -> Any:
    """Return the Keras `DataAdapter` of this rank's part, or `None` where Keras' own does. Collective.

    Args:
        job: the running job.
        team: the team whose ranks share the data.
        call: the `fit` or `evaluate` that opens the data.
        arguments: those of Keras' `EpochIterator`.

    Returns:
        A `DataAdapter`. Its attribute `may_be_empty`, the same on every rank, says whether some rank may get a batch
        without rows.

    Raises:
        ValueError: on every rank, if the data cannot be shared out, or differ between ranks in `fit`.
    """
    fixed = building.fixed_batch(call.model)
    if job.virtual is None:
        shard = Shard(team.replica, team.replicas, job.batch, fixed)
    else:
        parts = job.virtual.mine
        shard = Shard(parts.start, job.virtual.count, job.batch, fixed, len(parts))
    what = f"the data of Model.{call.kind}()"
    # Ranks whose data are refused must not leave the others waiting: they tell them why.
    try:
        adapter = _open(shard, team, arguments, _steps_of_all(call, arguments))
    except (TypeError, ValueError) as error:
        _exchange(team, {"error": f"{error}"}, what)
        raise
    if adapter is None:
        _raise_if_different(_exchange(team, {"data": None}, what))
        return None
    with seeds.kept() as have_moved:  # a data set may draw while its first batch is read
        several = team.size > 1 or (shard.turns > 1 and hasattr(adapter, "draws"))
        mine = {"data": adapter.fingerprint, "content": adapter.content() if several else ""}
        mine["draws"] = several and have_moved()
        mine["caches"] = getattr(adapter, "unfinished", [])
    if adapter.shuffle or mine["draws"]:
        # From NumPy's generator, which `keras.utils.set_random_seed` seeds; rank 0's is taken.
        mine["seed"] = int(np.random.randint(2**62, dtype=np.int64))
    everyone = _exchange(team, mine, what)
    differ = any((other.get("data"), other.get("content")) != (mine["data"], mine["content"]) for other in everyone)
    if call.kind == "evaluate" and differ and not any("error" in other for other in everyone):
        if team.parts > 1:
            raise ValueError(
                "With init(spatial=) the ranks of a group compute the same samples, so evaluate needs the same data on "
                f"all ranks. {_HINT} Received: other data on some ranks"
            )
        call.own_data = True  # what each rank asks for
        return None
    _raise_if_different(everyone)
    tf_caches.refuse_shared([other["caches"] for other in everyone])
    if "seed" in everyone[0]:
        adapter.seed = everyone[0]["seed"]
    adapter.draws = any(other["draws"] for other in everyone)
    _warn(team, adapter, differ)
    if call.kind == "fit" and not call.announced and team.size > 1 and team.rank == 0:
        log.info(f"{adapter.summary}; {team.size} ranks.")
    call.announced = True  # `fit` opens its own data first, then those of its validation
    return adapter


def check_steps(job: Job, team: Team, call: running.Call, arguments: dict[str, Any]) -> None:
    """Raise where ranks that read their own part would make different numbers of steps. Collective.

    Raises:
        ValueError: on every rank.
    """
    if team.size == 1 or call.kind != "fit" or call.announced:
        return
    call.announced = True
    names = ("y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight")
    steps: int | None = arguments.get("steps_per_epoch")
    if steps is None and not hasattr(arguments.get("x"), "__next__"):  # opening a generator takes its first batch
        steps = _get_data_adapter(arguments.get("x"), **_pick(arguments, *names)).num_batches
    everyone = team.allgather_object(steps, "the data of Model.fit()")
    if len(set(everyone)) > 1 and None not in everyone:
        few, many = min(everyone), max(everyone)
        raise ValueError(
            "With init(shard=False) every rank must make the same number of steps in an epoch, because each step "
            "communicates. Give all ranks as many batches, or `steps_per_epoch`. Received: "
            f"{few} steps on rank {everyone.index(few)} of the team, {many} on rank {everyone.index(many)}"
        )


def after_epoch(call: running.Call) -> None:
    """Warn, after the first epoch, of a pipeline that has given ranks other batches. Collective.

    Args:
        call: the `fit` whose epoch has ended.
    """
    first = getattr(call.adapter, "first", None)
    if first is None or first.was_compared:
        return
    first.was_compared = True
    everyone = current.team_of(call.model).allgather_object(first.digest(), "the data of Model.fit()")
    if len(set(everyone)) > 1 and current.team_of(call.model).rank == 0:
        log.warning(
            "A tf.data.Dataset that is shared out has given other integers, texts or flags on some ranks in its first "
            "batch, so samples may be repeated or left out, or the same word may be another number on each rank. A set "
            "of Python, of which a vocabulary may be made, has another order in each process: sort it. Where the "
            f"pipeline only augments samples, nothing is wrong. {_HINT}"
        )


def first_samples(arguments: dict[str, Any], adapter: Any) -> Any:
    """Return `(x, y, sample_weight)` of the first samples that a call was given, of arrays all of them.

    What a pipeline of TensorFlow begins with, where to read it would change what is read next. `None` where nobody can
    read samples without taking them away from the call.

    Args:
        arguments: those of Keras' `EpochIterator`.
        adapter: what `adapter_for` has returned, which has read some already.
    """
    import keras

    from keras_hpc.data.dataset import Dataset

    x: Any = arguments.get("x")
    if hasattr(adapter, "first_batch"):
        return adapter.first_batch
    if _can_convert_arrays((x, arguments.get("y"), arguments.get("sample_weight"))):
        return x, arguments.get("y"), arguments.get("sample_weight")
    with seeds.kept():  # a data set may draw while it is read
        if isinstance(x, Dataset):
            return x.rows(0, 0, 1)
        if isinstance(x, keras.utils.PyDataset):
            return x[0]
        if _is_tf_dataset(x) and hasattr(x, "take"):
            from keras_hpc.keras_hooks.data import tf_datasets

            return tf_datasets.constants(x) if tf_datasets.notices_reading(x) else next(iter(x.take(1)), None)
    return None


def _steps_of_all(call: running.Call, arguments: dict[str, Any]) -> int | None:
    """Return how many steps a call makes in all its passes over these data; None: nobody knows."""
    steps: int | None = arguments.get("steps_per_epoch")
    at_once = arguments.get("steps_per_execution") or 1
    # `fit` opens its own data first, then those of its validation, each of which begins anew.
    epochs = call.epochs - call.initial_epoch if call.kind == "fit" and not call.announced else 1
    return None if steps is None or epochs <= 0 else epochs * -(-steps // at_once) * at_once


def _open(shard: Shard, team: Team, arguments: dict[str, Any], steps: int | None) -> Any:
    """Return this rank's adapter, before anything is agreed on."""
    if shard.fixed is not None and shard.batch == "global" and shard.size > 1:
        raise ValueError(
            'With init(batch="global") ranks take parts of a batch, but this model takes batches of one size only. Use '
            'batch="local", or make the model without `batch_size`, which layers with stateful=True need. Received: a '
            f"batch size of {shard.fixed}"
        )
    given = _pick(arguments, "y", "sample_weight", "class_weight")
    x, shuffle = arguments.get("x"), arguments.get("shuffle", False)
    if _can_convert_arrays((x, given["y"], given["sample_weight"])):
        from keras_hpc.keras_hooks.data.arrays import ShardedArrays

        return ShardedArrays(shard, x, **given, **_pick(arguments, "batch_size", "steps_per_epoch"), shuffle=shuffle)
    open_batches = _batches_of(shard, team, x, given["class_weight"], shuffle, steps)
    if open_batches is None:
        return None
    if not hasattr(x, "__next__") or any(value is not None for value in given.values()):  # it would read a generator
        # Keras' own messages for `y=` beside a data set, class_weight beside a DataLoader and so on.
        _get_data_adapter(x, **given)
    return open_batches()


def _pick(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: arguments.get(name) for name in names}


def _batches_of(
    shard: Shard, team: Team, x: Any, class_weight: Any, shuffle: bool | str, steps: int | None
) -> Callable[[], Any] | None:
    """Return what opens a source of ready-made batches; `None` leaves it to Keras."""
    import keras

    if isinstance(x, keras.utils.PyDataset):
        from keras_hpc.keras_hooks.data.py_datasets import ShardedPyDataset

        return lambda: ShardedPyDataset(shard, x, class_weight, shuffle, functools.partial(seeds.agree, team))
    if _is_torch_dataloader(x):
        from keras_hpc.keras_hooks.data.torch_loaders import ShardedDataLoader, reads_its_own_part

        if reads_its_own_part(x) and shard.turns > 1:
            raise ValueError(
                "With init(virtual_ranks=) data are shared out among virtual ranks. Expected a DataLoader of all data. "
                "Received: one with a DistributedSampler"
            )
        return None if reads_its_own_part(x) else lambda: ShardedDataLoader(shard, x)
    if shard.size == 1:
        return None
    if _is_tf_dataset(x) and hasattr(x, "shard"):
        from keras_hpc.keras_hooks.data.tf_datasets import ShardedTFDataset

        return lambda: ShardedTFDataset(shard, x, class_weight, steps)
    if hasattr(x, "__next__") or _is_grain(x):
        from keras_hpc.keras_hooks.data.streams import ShardedStream

        return lambda: ShardedStream(shard, x, "generator" if hasattr(x, "__next__") else "grain data set")
    raise ValueError(
        f"keras_hpc cannot share out data of type {type(x).__name__} among {shard.size} ranks: each would see all of "
        "it. Expected arrays, tensors, a tf.data.Dataset, a PyDataset, a torch DataLoader, a Grain data set or a "
        "generator. "
        f"{_HINT} Received: x={x}"
    )


def _is_grain(x: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "grain" for kind in type(x).__mro__) and hasattr(x, "__iter__")


def _exchange(team: Team, mine: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [mine] if team.size == 1 else team.allgather_object(mine, what)


def _raise_if_different(everyone: Sequence[dict[str, Any]]) -> None:
    failed = [rank for rank, other in enumerate(everyone) if "error" in other]
    if failed:
        raise ValueError(f"The data were refused on rank {failed[0]}: {everyone[failed[0]]['error']}")
    first = everyone[0]["data"]
    different = [rank for rank, other in enumerate(everyone) if other["data"] != first]
    if different:
        raise ValueError(
            "The data set must be the same on every rank, for each rank to take its part of it; "
            f"it is not on rank(s) {', '.join(map(str, different))}. {_HINT} "
            f"Received: {first} on rank 0, {everyone[different[0]]['data']} on rank {different[0]}."
        )


def _warn(team: Team, adapter: Any, differ: bool) -> None:
    """Says on the team's first rank what looks wrong but may be meant."""
    # On all ranks: what a user's function counts or draws by itself stays alike on them.
    collates_together = getattr(adapter, "collates_together", bool)()
    if team.rank > 0:
        return
    if differ and team.parts > 1:
        log.warning(
            "The ranks' data have the same shapes but different contents, and the ranks of a group compute the same "
            "samples. If each reads its own rows of these, as keras_hpc.part says, call keras_hpc.init(shard=False) "
            "and read the samples of this rank's group, keras_hpc.group(); else ranks compute parts of different "
            f"samples. {_SAME}"
        )
    elif differ:
        log.warning(
            "The ranks' data have the same shapes but different contents, so samples are repeated and left out, and "
            f"validation data may be trained on. {_HINT}"
        )
    elif getattr(adapter, "unseeded", False):
        log.warning(
            "A tf.data.Dataset that is shared out shuffles without a seed: each rank has its own order, so samples are "
            "repeated and left out. Make it after keras_hpc.init(), give `shuffle` a seed, or call "
            "keras.utils.set_random_seed before it."
        )
    if getattr(adapter, "unordered", False):
        log.warning(
            "A tf.data.Dataset that is shared out has deterministic=False in a `map` or `batch`: each rank has an "
            "order of its own, so samples are repeated and left out. Leave the argument out."
        )
    if getattr(adapter, "draws_ahead", False):
        log.warning(
            "A tf.data.Dataset that is shared out has a `map` or `prefetch` behind `repeat` and `shuffle`. Each rank "
            "reads ahead as far as it has time to, and may begin another order: the next validation or `fit` may then "
            "repeat samples and leave others out. Put `repeat` last: shuffle, map, batch, repeat."
        )
    if collates_together:
        log.warning(
            "The collate_fn of a DataLoader gives a sample other numbers when it gets other samples with it. With "
            'init(batch="global") it gets a rank\'s part of each batch, and so gives other numbers than on one rank. '
            'Let it make each row of its own sample only, or use batch="local".'
        )
