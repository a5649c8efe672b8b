# SPDX-License-Identifier: Apache-2.0
"""The thread of each rank that looks after its waits, and what those of different ranks tell each other.

A rank that waits longer than `stall_seconds` tells rank 0, which asks every rank once for its state and writes one
report. Messages go between rank 0 and another rank only. The engine itself ends waits after `timeout_seconds`, by an
error in the rank that waits; where that is not possible, the watchdog ends the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from keras_hpc.job.current import Job
from keras_hpc.job.exit import wait_for_readers
from keras_hpc.job.watchdog import report
from keras_hpc.job.watchdog.mail import Mail, Message
from keras_hpc.job.watchdog.state import GONE, Key, Place, Stall, State, resolved_of, stalls_of, state_of

_log = logging.getLogger("keras_hpc")

_IDLE_SECONDS = 0.5
_BUSY_SECONDS = 0.01
# How long rank 0 waits for states, and other ranks for rank 0.
_ANSWER_SECONDS = 2.0
# How long a rank that ends the job lets rank 0 say so.
_LAST_WORD_SECONDS = 2.0
# What the engine has to end a wait after timeout_seconds.
_GRACE_SECONDS = 3.0
_CLOSE_SECONDS = 5.0
# Between two turns of the thread: if it is more, the process was stopped, as when a batch system suspends a job.
_STOPPED_SECONDS = 5.0


class Watchdog:
    """Looks after the waits of a job. Collective: made and closed by all ranks."""

    def __init__(self, job: Job, stall_seconds: float) -> None:
        self._job = job
        # A report must come before the limit.
        self._answer_seconds = min(_ANSWER_SECONDS, max(0.2, (job.timeout_seconds - stall_seconds) / 2))
        self._mail = Mail(job.comm)
        mine = dataclasses.asdict(Place.mine())
        self._places = [Place(**place) for place in job.teams[0].allgather_object(mine, "where the ranks run")]
        self._neighbours = {
            rank: place
            for rank, place in enumerate(self._places)
            # Containers on one node may not see each other's processes.
            if rank != job.rank and job.node_of_rank[rank] == job.node and place.process() != GONE
        }
        self._told: set[Key] = set()  # waits that rank 0 knows from this rank
        self._unheard_since: float | None = None  # the first of them that it has not answered
        self._known: set[Key] = set()  # of rank 0: waits that it has asked about
        self._over: set[Key] = set()  # and of these those that have come to a good end
        self._states: dict[int, State] | None = None  # of rank 0: answers, while it asks
        self._deadline = 0.0
        self._reason: str | None = None  # why this rank ends the job
        self._reason_told = False
        self._abort_at: float | None = None
        self._heard = threading.Event()  # rank 0 has said so
        self._closing = threading.Event()
        self._closed: set[int] = set()  # ranks that send nothing any more
        self._looked_at = time.monotonic()
        self._went_on_at = -math.inf  # after it was stopped
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keras_hpc watchdog", daemon=True)
        self._thread.start()

    def last_word(self, reason: str) -> None:
        """Lets rank 0 say why this rank is about to end the job; does not wait for it long."""
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._reason = reason
            self._wake.set()
            self._heard.wait(_LAST_WORD_SECONDS)

    def close(self) -> None:
        """Collective: ends the thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(2 * _CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._mail.free()

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
            deadline = time.monotonic() + _CLOSE_SECONDS
            if self._job.rank != 0:
                self._send(0, "close")
            while not self._is_closed() and time.monotonic() < deadline:
                self._turn()
        except Exception:  # noqa: BLE001 - a watchdog that fails must not end a training that works
            _log.warning("rank %d: its watchdog has failed; the training goes on", self._job.rank, exc_info=True)

    def _turn(self) -> None:
        busy = self._mail.on_the_way or self._states is not None or self._reason or self._closing.is_set()
        self._wake.wait(_BUSY_SECONDS if busy else _IDLE_SECONDS)
        self._wake.clear()
        for source, message in self._mail.receive():
            self._handle(source, message)
        self._look()
        if self._states is not None and (len(self._states) == self._job.size or time.monotonic() > self._deadline):
            self._report()
        self._speak()

    def _is_closed(self) -> bool:
        """Rank 0 answers when all others have said farewell: by then each has received all that came before."""
        return len(self._closed) == (self._job.size - 1 if self._job.rank == 0 else 1) and not self._mail.on_the_way

    def _send(self, rank: int, kind: str, **content: Any) -> None:
        message = {"kind": kind, **content}
        if rank == self._job.rank:
            self._handle(rank, message)
        else:
            self._mail.send(rank, message)

    def _handle(self, source: int, message: Message) -> None:
        match message["kind"]:
            # To rank 0.
            case "stall":
                self._ask(source, Stall(**message["stall"]))
            case "state" if self._states is not None:
                self._states[source] = State.from_json(message["state"])
            case "resolved":
                self._say_resolved(Stall(**message["stall"]))
            case "end":
                self._report()
                _write(f"keras_hpc: rank {source} ends the job: {message['reason']}\n")
                wait_for_readers()
                self._send(source, "heard")
            # From rank 0.
            case "ask":
                self._unheard_since = None
                state = self._state()
                _write(report.own_text(state, Stall(**message["stall"]), whole=_has_file()))
                self._send(0, "state", state=dataclasses.asdict(state))
            case "known":
                self._unheard_since = None
            case "heard":
                self._heard.set()
            case "close":
                self._closed.add(source)
                if self._job.rank == 0 and len(self._closed) == self._job.size - 1:
                    for rank in range(1, self._job.size):
                        self._send(rank, "close")

    def _look(self) -> None:
        """At this rank's own waits, and at what others tell of teams that have no thread to hear it."""
        now = time.monotonic()
        if now - self._looked_at > _STOPPED_SECONDS:
            self._went_on_at = now
        self._looked_at = now
        for team in self._job.all_teams:
            if team.rank >= 0:
                team.native.look_around()
        for stall in stalls_of(self._job.all_teams):
            if stall.key not in self._told:
                self._told.add(stall.key)
                self._unheard_since = now if self._job.rank != 0 else None
                self._send(0, "stall", stall=dataclasses.asdict(stall))
            if min(stall.seconds, now - self._went_on_at) > self._job.timeout_seconds + _GRACE_SECONDS:
                self._end(f"it waited {stall.seconds:.0f} s in {report.where_text(stall)}, where no error can end it.")
        for stall in resolved_of(self._job.all_teams):
            if stall.key in self._told:
                self._send(0, "resolved", stall=dataclasses.asdict(stall))
        if self._unheard_since is not None and now - self._unheard_since > self._answer_seconds:
            self._unheard_since = None
            state = self._state()
            _write(report.without_rank_0(state, self._places))
            self._end_without([0], [state])

    def _state(self) -> State:
        leaves = self._job.guard.is_leaving
        return state_of(self._job.rank, self._job.all_teams, self._neighbours, leaves)

    def _end(self, reason: str) -> None:
        """End the job, once rank 0 has said why."""
        if self._abort_at is None:
            self._reason = reason
            self._abort_at = time.monotonic() + _LAST_WORD_SECONDS

    def _end_without(self, silent: Iterable[int], states: Iterable[State]) -> None:
        """End the job if a process has ended: nobody will ever come, whatever its launcher thinks of it."""
        for rank in silent:
            if report.has_ended(rank, states):
                self._end(f"the process of rank {rank} has ended, and others wait for it.")

    def _speak(self) -> None:
        """Tells rank 0 why this rank ends the job, and ends it if that is the watchdog's part."""
        if self._reason is not None and not self._reason_told:
            self._reason_told = True
            if self._job.rank == 0:
                self._report()
                self._heard.set()
            else:
                self._send(0, "end", reason=self._reason)
        if self._abort_at is not None and (self._heard.is_set() or time.monotonic() > self._abort_at):
            self._job.guard.abort(1, str(self._reason))

    # ---- on rank 0

    def _ask(self, source: int, stall: Stall) -> None:
        """Asks all ranks, if this is a new wait. Those that begin while it asks are in the same report."""
        if stall.key in self._known or self._states is not None:
            self._known.add(stall.key)
            if source != 0:
                self._send(source, "known")
            return
        self._known.add(stall.key)
        self._states = {0: self._state()}
        self._deadline = time.monotonic() + self._answer_seconds
        for rank in range(1, self._job.size):
            self._send(rank, "ask", stall=dataclasses.asdict(stall))

    def _report(self) -> None:
        if self._states is None:
            return
        states, self._states = self._states, None
        if not any(state.stalls for state in states.values()):
            return  # it is over already
        self._known.update(stall.key for state in states.values() for stall in state.stalls)
        _write(report.text(states, self._places, self._job.members, self._job.timeout_seconds))
        self._end_without([rank for rank in range(self._job.size) if rank not in states], states.values())
        left = report.has_left(states, self._job.members)
        if left is not None:  # the engine knows of ranks of one node only
            self._end(
                f"rank {left[0]} has reached the end of its script, or called finalize, and others wait for it in "
                f"{report.where_text(left[1])}. Do all ranks run the same number of steps, and make the same calls?"
            )

    def _say_resolved(self, stall: Stall) -> None:
        self._report()
        if stall.key in self._known and stall.key not in self._over:
            self._over.add(stall.key)
            _write(f"keras_hpc: {report.where_text(stall)} goes on, after {stall.seconds:.0f} s.\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a full disk: to end the job matters more than to say why
        sys.stderr.write(text)
        sys.stderr.flush()


def _has_file() -> bool:
    """Whether stderr is a file, and so probably this rank's own and not what all ranks write to."""
    try:
        return stat.S_ISREG(os.fstat(2).st_mode)
    except OSError:  # closed
        return False
