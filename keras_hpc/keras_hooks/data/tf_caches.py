# SPDX-License-Identifier: Apache-2.0
"""Files in which `tf.data` keeps what it has read: each rank needs its own, as only one process can write one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from keras_hpc.job import current


def install(job: Any, patcher: Any) -> None:
    """Let `cache(filename)` take another file on each rank.

    A rank that finds another's file half written raises an error; if it is just whole, the rank reads it.
    """
    tensorflow = sys.modules.get("tensorflow")
    if job.size > 1 and tensorflow is not None:
        patcher.patch(tensorflow.data.Dataset, "cache", _own_file)


def _own_file(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cache(self: Any, filename: Any = "", name: Any = None) -> Any:
        rank = current.job().rank if current.active() else 0
        if rank and not (isinstance(filename, str) and filename == ""):  # rank 0 has the name that was given
            import tensorflow as tf

            given = tf.convert_to_tensor(filename, tf.string)
            filename = tf.where(given == "", given, given + f".rank{rank}")
        return original(self, filename, name)

    return cache


def unfinished(dataset: Any) -> list[str]:
    """Return the names of files that the first pass over a pipeline will write."""
    import tensorflow as tf

    names = []
    if "CacheDataset" in type(dataset).__name__ and hasattr(dataset._filename, "numpy"):
        name = dataset._filename.numpy().decode()
        names = [name] if name and not tf.io.gfile.exists(f"{name}.index") else []
    return names + [name for source in dataset._inputs() for name in unfinished(source)]


def refuse_shared(files_of_ranks: list[list[str]]) -> None:
    """Raise where several ranks would write one file.

    Args:
        files_of_ranks: what `unfinished` gives on each rank of the team.

    Raises:
        ValueError: names the file.
    """
    names = [name for files in files_of_ranks for name in set(files)]
    shared = sorted({name for name in names if names.count(name) > 1})
    if shared:
        raise ValueError(
            "Each rank needs a file of its own for `cache(filename)` of a tf.data.Dataset: one alone can write it. "
            "keras_hpc gives it one if `import tensorflow` comes before keras_hpc.init(), and the data set is made "
            f"after it. Received: {shared[0]!r} on several ranks"
        )
