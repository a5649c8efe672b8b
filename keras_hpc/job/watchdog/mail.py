# SPDX-License-Identifier: Apache-2.0
"""Messages between watchdogs: JSON over MPI, never waiting, because the other side may have stopped."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

# A look also moves what is on its way, and MPICH shows a message only to the second one.
_LOOKS = 3


class Mail:
    """Sends and receives on a communicator of its own. One thread at a time."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm.Dup()
        self._sends: list[tuple[Any, bytes]] = []
        self._receives: list[tuple[Any, int, bytearray]] = []

    def send(self, rank: int, message: Message) -> None:
        """Send on its way; two messages to one rank arrive in order."""
        from mpi4py import MPI

        data = json.dumps(message).encode()
        self._sends.append((self._comm.Isend([data, MPI.BYTE], dest=rank), data))

    def receive(self) -> list[tuple[int, Message]]:
        """Return what has come, with who sent it."""
        from mpi4py import MPI

        status = MPI.Status()
        looks = 0
        while looks < _LOOKS:
            message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message is None:
                looks += 1
                continue
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self._receives.append((message.Irecv([buffer, MPI.BYTE]), status.Get_source(), buffer))
        self._sends = [(request, data) for request, data in self._sends if not request.Test()]
        come = [request.Test() for request, _, _ in self._receives]
        everything = list(zip(come, self._receives, strict=True))
        self._receives = [entry for has_come, entry in everything if not has_come]
        return [(source, json.loads(buffer)) for has_come, (_, source, buffer) in everything if has_come]

    @property
    def on_the_way(self) -> bool:
        """Whether messages are on their way from or to this rank, as far as it knows."""
        return bool(self._sends or self._receives)

    def free(self) -> None:
        """Collective: frees the communicator."""
        if not self.on_the_way:
            self._comm.Free()
