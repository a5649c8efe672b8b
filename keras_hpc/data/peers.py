# SPDX-License-Identifier: Apache-2.0
"""Gets blocks of files from the node that has read them.

The first rank of each node answers, on a communicator of its own, by a thread that looks for questions. It sleeps in
between, because an MPI library that waits takes a core.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from keras_hpc.data.files import Source
from keras_hpc.errors import CommunicationTimeoutError

_QUESTION = 1
_FIRST_ANSWER = 2
_ANSWERS = 64  # questions of a rank that may be open at once
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 2e-3  # s
_READERS = 4


class Peers:
    """The nodes of a job, as those that hold blocks. Collective to make.

    Args:
        comm: an mpi4py communicator, which stays this object's own.
        node_of_rank: the node of every rank.
        timeout_seconds: for which a question waits for its answer.
    """

    def __init__(self, comm: Any, node_of_rank: Sequence[int], timeout_seconds: float) -> None:
        self._comm = comm
        self._first_of_node = [node_of_rank.index(node) for node in range(max(node_of_rank) + 1)]
        self._timeout_seconds = timeout_seconds
        self._tags: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(_ANSWERS):
            self._tags.put(_FIRST_ANSWER + number)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def answer(self, block: Callable[[Source, int, int, int], bytes]) -> None:
        """Answer the other nodes from now on, if this rank is its node's first.

        Args:
            block: `(source, number, begin, nbytes) -> bytes`, what returns a part of a block.
        """
        if self._comm.rank in self._first_of_node:
            self._thread = threading.Thread(target=self._serve, args=(block,), name="keras_hpc data", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop answering. No rank may ask any more. Collective."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._comm.Free()

    def fetch(self, node: int, source: Source, block: int, begin: int, nbytes: int) -> bytes:
        """Return a part of a block from another node. Threads may do so at once.

        Raises:
            OSError: the other node cannot read the file; says which and why.
            CommunicationTimeoutError: no answer.
        """
        root = self._first_of_node[node]
        tag = self._tags.get()
        question = json.dumps([tag, source.path, source.size, source.changed, block, begin, nbytes]).encode()
        self._wait(self._comm.Isend(np.frombuffer(question, np.uint8), root, _QUESTION), source, node)
        head = np.empty(2, np.int64)  # whether it is an error, and bytes that follow
        self._wait(self._comm.Irecv(head, root, tag), source, node)
        body = np.empty(head[1], np.uint8)
        self._wait(self._comm.Irecv(body, root, tag), source, node)
        self._tags.put(tag)  # not after an error above: an answer may still come
        if head[0]:
            raise OSError(f"Node {node} cannot read what it keeps for the others. {body.tobytes().decode()}")
        return body.tobytes()

    def _wait(self, request: Any, source: Source, node: int) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        pause = _SHORTEST_PAUSE
        while not request.Test():
            if time.monotonic() > deadline:
                raise CommunicationTimeoutError(
                    f"Node {node} did not answer within {self._timeout_seconds:g} s, when asked for a part of "
                    f"{source.path}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _serve(self, block: Callable[[Source, int, int, int], bytes]) -> None:
        from mpi4py import MPI

        pause = _SHORTEST_PAUSE
        with ThreadPoolExecutor(_READERS, "keras_hpc data") as pool:
            while not self._stop.is_set():
                status = MPI.Status()
                message = self._comm.Improbe(MPI.ANY_SOURCE, _QUESTION, status)
                if message is None:
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                    continue
                pause = _SHORTEST_PAUSE
                question = np.empty(status.Get_count(), np.uint8)
                message.Recv(question)
                pool.submit(self._reply, block, status.Get_source(), json.loads(question.tobytes()))

    def _reply(self, block: Callable[[Source, int, int, int], bytes], asker: int, question: list[Any]) -> None:
        tag, path, size, changed, number, begin, nbytes = question
        try:
            failed, content = 0, block(Source(path, size, changed), number, begin, nbytes)
        except Exception as error:  # noqa: BLE001 - whatever it is, the rank that asked must not wait for it
            failed, content = 1, f"{type(error).__name__}: {error}".encode()
        body = np.frombuffer(content, np.uint8)
        requests = [self._comm.Isend(np.array([failed, len(body)], np.int64), asker, tag)]
        requests.append(self._comm.Isend(body, asker, tag))
        while not all([request.Test() for request in requests]) and not self._stop.is_set():
            time.sleep(_SHORTEST_PAUSE)
