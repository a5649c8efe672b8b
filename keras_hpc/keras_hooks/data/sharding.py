# SPDX-License-Identifier: Apache-2.0
"""Chooses how to share out what the user gave to Keras, and lets the ranks agree on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays

from keras_hpc.job import log
from keras_hpc.job.current import Job
from keras_hpc.job.team import Team
from keras_hpc.keras_hooks.data.partition import Place

_HINT = "If each rank reads its own part of the data, call keras_hpc.init(shard=False)."


def adapter_for(job: Job, team: Team, arguments: dict[str, Any], announce: bool = False) -> Any:
    """Returns the Keras `DataAdapter` of this rank's part, or `None` where Keras' own does. Collective.

    Args:
        job: the running job.
        team: the team whose ranks share the data.
        arguments: those of Keras' `EpochIterator`.
        announce: whether rank 0 says what was decided.

    Returns:
        A `DataAdapter`. Its attribute `may_be_empty`, the same on every rank, says whether some rank may get a batch
        without rows.

    Raises:
        ValueError: on every rank, if the data cannot be shared out, or differ between ranks.
    """
    place = Place(team.rank, team.size, job.batch)
    # Ranks whose data are refused must not leave the others waiting: they tell them why.
    try:
        adapter = _open(place, arguments)
    except (TypeError, ValueError) as error:
        _exchange(team, {"error": f"{error}"})
        raise
    if adapter is None:
        _raise_if_different(_exchange(team, {"data": None}))
        return None
    mine = {"data": adapter.fingerprint, "content": adapter.content()}
    if adapter.shuffle:
        # From NumPy's generator, which `keras.utils.set_random_seed` seeds; rank 0's is taken.
        mine["seed"] = int(np.random.randint(2**62, dtype=np.int64))
    everyone = _exchange(team, mine)
    _raise_if_different(everyone)
    if adapter.shuffle:
        adapter.seed = everyone[0]["seed"]
    _warn(team, adapter, [other["content"] for other in everyone])
    if announce and team.size > 1 and team.rank == 0:
        log.info(f"{adapter.summary}; {team.size} ranks.")
    return adapter


def _open(place: Place, arguments: dict[str, Any]) -> Any:
    """Returns this rank's adapter, before anything is agreed on."""
    given = _pick(arguments, "y", "sample_weight", "class_weight")
    x, shuffle = arguments.get("x"), arguments.get("shuffle", False)
    if can_convert_arrays((x, given["y"], given["sample_weight"])):
        from keras_hpc.keras_hooks.data.arrays import ShardedArrays

        return ShardedArrays(place, x, **given, **_pick(arguments, "batch_size", "steps_per_epoch"), shuffle=shuffle)
    open_batches = _batches_of(place, x, given["class_weight"], shuffle)
    if open_batches is None:
        return None
    # Keras' own messages for `y=` beside a data set, class_weight beside a DataLoader and so on.
    data_adapters.get_data_adapter(x, **given)
    return open_batches()


def _pick(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: arguments.get(name) for name in names}


def _batches_of(place: Place, x: Any, class_weight: Any, shuffle: bool | str) -> Callable[[], Any] | None:
    """Returns what opens a source of ready-made batches; `None` leaves it to Keras."""
    import keras

    if isinstance(x, keras.utils.PyDataset):
        from keras_hpc.keras_hooks.data.py_datasets import ShardedPyDataset

        return lambda: ShardedPyDataset(place, x, class_weight, shuffle)
    if data_adapters.is_torch_dataloader(x):
        from keras_hpc.keras_hooks.data.torch_loaders import ShardedDataLoader, reads_its_own_part

        return None if reads_its_own_part(x) else lambda: ShardedDataLoader(place, x)
    if place.size == 1:
        return None
    if data_adapters.is_tf_dataset(x) and hasattr(x, "shard"):
        from keras_hpc.keras_hooks.data.tf_datasets import ShardedTFDataset

        return lambda: ShardedTFDataset(place, x, class_weight)
    raise ValueError(
        f"keras_hpc cannot share out data of type {type(x).__name__} among {place.size} ranks: each would see all of "
        "it. Expected arrays, tensors, a tf.data.Dataset, a keras.utils.PyDataset or a torch DataLoader. "
        f"{_HINT} Received: x={x}"
    )


def _exchange(team: Team, mine: dict[str, Any]) -> list[dict[str, Any]]:
    return [mine] if team.size == 1 else team.allgather_object(mine)


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


def _warn(team: Team, adapter: Any, contents: list[int]) -> None:
    """Says on the team's first rank what looks wrong but may be meant."""
    logger = logging.getLogger("keras_hpc")
    if team.rank == 0 and any(content != contents[0] for content in contents):
        logger.warning("The ranks' arrays have the same shapes but different contents. %s", _HINT)
    if team.rank == 0 and getattr(adapter, "unseeded", False):
        logger.warning(
            "A tf.data.Dataset that is shared out shuffles without a seed: each rank has its own order, so samples are "
            "repeated and left out. Give `shuffle` a seed, or call keras.utils.set_random_seed before it."
        )
