# SPDX-License-Identifier: Apache-2.0
"""`stage`: from then on the job reads each byte of its data once."""

from __future__ import annotations

import os
import re
import shutil
import uuid

from keras_hpc.data import files
from keras_hpc.data.cache import Cache
from keras_hpc.data.peers import Peers
from keras_hpc.job import current, launch

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def stage(folder: str | os.PathLike[str], limit: int | str) -> None:
    """Keep on the nodes what the job reads from its data, so that each byte is read once. Collective.

    What `Dataset`, `open_store` and `open_file` read from then on is kept in `folder` of the node that reads it, and
    the ranks of a node share it. With several nodes each reads its part of the files and gives the
    others what they need over MPI. Of a `Dataset` the blocks that are mixed next are read meanwhile. What does not fit
    into `limit` is read again each time it is needed. The space is free again when the job ends, however it ends.

    Args:
        folder: on a disk of the node, or in its memory, such as "/dev/shm"; it must exist on each node.
        limit: bytes that it may take on each node, a number or a text such as "20GB" or "512MiB".

    Raises:
        NotInitializedError: before `init`.
        RuntimeError: called twice.
        ValueError: no such folder, or a limit that is no number of bytes or more than there is.
        OSError: the folder cannot be written.
    """
    job = current.job()
    world = launch.World(job.comm, job.rank, job.size, job.node_of_rank)
    name = launch.exchange(world, uuid.uuid4().hex)[job.node_of_rank.index(job.node)]
    peers: Peers | None = None
    made: list[Cache] = []

    def opened() -> Cache:
        if files.reader() is not None:
            raise RuntimeError("keras_hpc.data.stage() was called twice. One cache serves all data of a job.")
        nbytes = _bytes(limit)
        whole = os.path.abspath(folder)
        if not os.path.isdir(whole):
            raise ValueError(f"`folder` is where the node keeps data. Expected a folder. Received: folder={whole!r}")
        free = shutil.disk_usage(whole).free
        if nbytes > free:
            raise ValueError(
                f"`limit` is the space that the cache may take in {whole}. Expected at most the {free:,} bytes that "
                f"are free there. Received: limit={limit!r}"
            )
        made.append(Cache(whole, name, nbytes, job.node, job.node_count))
        return made[0]

    try:
        cache = launch.on_all_ranks(world, opened)  # from here on all have opened the files
    except BaseException:  # of this rank or another, or an interruption: nothing stays in the folder; raised again
        for cache in made:
            cache.unlink()
            cache.close()
        raise
    if job.local_rank == 0:
        cache.unlink()
    if job.node_count > 1:
        peers = Peers(job.comm.Dup(), job.node_of_rank, job.timeout_seconds)
        peers.answer(cache.block)
        cache.fetch = peers.fetch
    files.use(cache)

    def close() -> None:
        files.use(None)
        if peers is not None:
            peers.close()
        cache.close()

    job.at_end.callback(close)


def traffic() -> dict[str, int]:
    """Return what was read so far, in bytes.

    Returns:
        "read": from the sources, by all ranks of this node after `stage`, else by this rank. After `stage` also
        "kept" and "kept_for_others": in this node's cache, of the parts that this node and other nodes read;
        "from_nodes": what other nodes have sent; "refused": what was read but had no room in the cache.
    """
    cache = files.reader()
    if not isinstance(cache, Cache):
        return {"read": files.read_bytes()}
    return cache.traffic()


def _bytes(limit: int | str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(limit).upper())
    if isinstance(limit, bool) or found is None or found[2] not in _UNITS or float(found[1]) <= 0:
        raise ValueError(
            "`limit` is the space that the cache may take on a node. Expected a number of bytes, or a text such as "
            f"'20GB' or '512MiB'. Received: limit={limit!r}"
        )
    return int(float(found[1]) * _UNITS[found[2]])
