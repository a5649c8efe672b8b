# SPDX-License-Identifier: Apache-2.0
"""What `callbacks.Checkpoint` does in `fit`: where it saves, how the next process goes on from there, when it stops.

It must come after all other callbacks, the ranks' agreements and Keras' own preparations. So `fit` calls it, not Keras.
Going on has three parts: the position in the epochs, before other callbacks learn it; all values, when the ranks have
been made equal; and for the middle of a pass, once more when its iterator exists, because Keras, callbacks and
iterators change some of the values as an epoch begins.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_hpc import callbacks as ours
from keras_hpc.job import supervised
from keras_hpc.keras_hooks import building, running
from keras_hpc.keras_hooks.checkpoint import callback_state, position, snapshot, stop_signals, storage
from keras_hpc.keras_hooks.checkpoint.store import Store
from keras_hpc.keras_hooks.state import settling


class Session:
    """A `fit` with a `Checkpoint`.

    Args:
        model: the model that trains.
        given: the callback.
    """

    def __init__(self, model: Any, given: Any) -> None:
        self.model = model
        self.store = Store(snapshot.Trained([model]), given.path, given.keep)
        self.team = self.store.team
        self.every = given.every_steps
        self.request = stop_signals.Request()
        self.iterator: Any = None  # the EpochIterator
        self.epoch = self.step = 0  # of the epoch, steps are done
        self.done = 0  # steps of all epochs
        self.count: Any = None  # of iterators over the data
        self._due = False
        self._saved = (-1, -1)  # steps and epochs that were done
        self._position: dict[str, Any] | None = None  # in the middle of a pass, not gone to yet

    @classmethod
    def of(cls, model: Any, callbacks: list[Any]) -> Session | None:
        """Return the session of a `fit` with these callbacks; None without a `Checkpoint`."""
        found = [callback for callback in callbacks if isinstance(callback, ours.Checkpoint)]
        if len(found) > 1:
            raise ValueError(f"Expected one Checkpoint in a `fit`. Received: {len(found)}")
        return cls(model, found[0]) if found else None

    @staticmethod
    def check_everywhere(team: Any, session: Session | None) -> None:
        """Raise unless all ranks of a team have a session and save after the same steps, or none has. Collective on it.

        Raises:
            ValueError: some have one, or others save at other times.
        """
        here = session is not None
        numbers = np.array([0, 0] if session is None else [session.every or 0, session.store.keep], np.int64)
        most = np.concatenate([[here, not here], numbers, -numbers])
        team.allreduce(most, op="max")
        if most[:2].all():
            raise ValueError(
                "Checkpoint is collective. Expected it among the callbacks of every rank, without an `if "
                f"keras_hpc.rank() == 0:`. Received: {'a' if here else 'no'} Checkpoint on rank {team.rank} of the team"
            )
        if (most[2:4] != -most[4:]).any():
            raise ValueError(
                "Checkpoint is collective. Expected the same `every_steps` and `keep` on every rank. Received: "
                f"every_steps={numbers[0] or None}, keep={numbers[1]} on rank {team.rank}, and others on another rank"
            )

    def __enter__(self) -> Session:
        self.request.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.store.agree(wait=True)
            else:
                self.store.let_finish()
        finally:
            self.request.__exit__()

    def begin(self, callbacks: Any) -> None:
        """Look at the disk, finds the checkpoint to go on from, and tells Keras the epoch. Collective."""
        self._build()
        self.count = position.Count(self.iterator)
        if not position.order_is_known(self.iterator) and self.team.rank == 0:
            logging.getLogger("keras_hpc").warning(
                "Checkpoint: these data come in an order of their own. Training that goes on drops as many batches as "
                "were read of the epoch before, whatever they hold. Received: %s",
                type(self.iterator.data_adapter).__name__,
            )
        path = self.store.open("fit")
        if path is None or self.store.found is None:
            return
        facts, _ = self.store.found
        self.epoch, self.done = facts["epoch"], facts["done"]
        self._saved = (self.done, self.epoch)
        place = position.translate(facts["position"], self.iterator, self.team)
        self.step = place["step"]
        self.count.begun = position.seek(self.iterator, place)
        self._position = place if place["seen"] else None
        epochs = callbacks.params.get("epochs", 0)
        self.model._initial_epoch = epochs if facts["stopped"] else self.epoch
        self._say_where(path, epochs, place)

    def restore(self, callbacks: Any) -> None:
        """Put back what the checkpoint holds, now that other callbacks and hooks have begun. Collective."""
        if self.store.found is None:
            return
        facts, _ = self.store.found
        self.store.put_back()
        history = callbacks._history
        if history is not None:
            history.history = {name: list(values) for name, values in facts["history"].items()}
            history.epoch = list(facts["epochs"])
        arrays = self.store.callback_arrays()
        with self.team.telling("Checkpoint: what callbacks remember"):
            callback_state.put_back(callbacks, facts["callbacks"], arrays)
        self.team.meet("Checkpoint: what callbacks remember")
        self._plan_schedule(callbacks)
        if self._position is None:
            self.store.found = None

    def steps_of(self, iterator: Any, steps: Iterator[Any]) -> Iterator[Any]:
        """Yield what is left of an epoch's steps. Collective where training goes on in the middle of a pass."""
        if iterator is not self.iterator:
            yield from steps
            return
        steps = self._counted(steps)
        if self._position is None or self.store.found is None:
            yield from steps
            return
        place, self._position = self._position, None
        first = True
        for item in position.skipped(iterator, steps, place):
            if first:
                self.store.put_back()
                if self.step == 0:  # the saved metrics are those of the epoch before
                    self.model.reset_metrics()
                self.store.found, first = None, False
            yield item

    def _counted(self, steps: Iterator[Any]) -> Iterator[Any]:
        for item in steps:
            if self.count is not None:
                self.count.step()
            yield item

    def after_batch(self, callbacks: Any, batch: int) -> None:
        """Save if it is time to, or if a signal asks to stop. Collective."""
        before, self.done = self.done, self.done + batch + 1 - self.step
        self.step = batch + 1
        self._due |= self.every is not None and self.done // self.every > before // self.every
        steps = self.iterator.num_batches
        if steps is not None and self.step >= steps:
            return  # the end of the epoch follows, with its metrics and validation
        stop = self._look(self.request.after_step)
        # Of data of unknown length nobody knows whether this was the last step.
        if stop or (self._due and steps is not None):
            self.save(callbacks)
        if stop:
            self._leave(stop)

    def after_epoch(self, callbacks: Any, epoch: int) -> None:
        """Save if it is time to, if training ends, or if a signal asks to stop. Collective."""
        self.epoch, self.step = epoch + 1, 0
        last = self.epoch >= callbacks.params.get("epochs", 0) or self.model.stop_training
        stop = self._look(self.request.after_epoch)
        if self.every is None or self._due or last or stop:
            self.save(callbacks)
        if stop and not last:
            self._leave(stop)

    def _look(self, look: Callable[[Any], int]) -> int:
        """Return the signal that a rank has received, or 0; and learn how the checkpoint on its way does. Collective.

        Raises:
            OSError: on all ranks: it could not be written.
        """
        looks = self.request.looks
        stop = look(self.team)
        if self.request.looks > looks:  # on all ranks
            self.store.agree()
        return stop

    def save(self, callbacks: Any) -> None:
        """Begin to write a checkpoint. Collective.

        Raises:
            OSError: on all ranks, if the one before could not be written.
        """
        self._due = False
        if self._saved == (self.done, self.epoch):
            return

        def facts() -> tuple[dict[str, Any], list[np.ndarray]]:
            states, arrays = callback_state.take(callbacks)
            history = callbacks._history
            return {
                "kind": "fit",
                "epoch": self.epoch,
                "done": self.done,
                "stopped": bool(self.model.stop_training) and self.step == 0,
                "position": position.tell(self.iterator, self.step, self.team, self.count.begun),
                "history": {} if history is None else {k: np.asarray(v).tolist() for k, v in history.history.items()},
                "epochs": [] if history is None else list(history.epoch),
                "callbacks": states,
            }, arrays

        self.store.save(self.done, facts)
        self._saved = (self.done, self.epoch)

    def _build(self) -> None:
        """Build model, metrics and optimizer where Keras does it in the first step only, which is on TensorFlow."""
        data = getattr(self.iterator, "_distributed_dataset", None)
        if data is not None:
            building.build(self.model, data.element_spec, metrics=True)

    def _plan_schedule(self, callbacks: Any) -> None:
        fit = running.call()
        if fit is None or not fit.active:
            return
        steps = self.iterator.num_batches
        epochs = callbacks.params.get("epochs", 0) - fit.initial_epoch
        done = self.done if steps is None else (self.epoch - fit.initial_epoch) * steps + self.step
        settling.plan_schedule(self.model, None if steps is None else steps * epochs, done)

    def _say_where(self, path: str, epochs: int, place: dict[str, Any]) -> None:
        assert self.store.found is not None  # noqa: S101
        facts, _ = self.store.found
        before = facts["position"]
        now = position.tell(self.iterator, 0, self.team)
        where = f"epoch {self.epoch + 1} of {epochs}, step {self.step + 1}" if self.epoch < epochs else "its end"
        self.store.say(f"goes on from {path}: {'stopped by a callback' if facts['stopped'] else where}")
        were = snapshot.arranged(facts["model"])
        are = snapshot.arranged({"ranks": self.team.size, "parts": self.team.parts})
        if are != were and facts["model"].get("virtual_ranks"):
            self.store.say(f"{are}, were {were}")
        elif are != were:
            self.store.say(
                f"{are}, were {were}: not bit for bit. "
                "New: random states of ranks 1 and up. Averaged: statistics of each rank. Metrics of the epoch count "
                "from here"
            )
        elif before["data"] != now["data"]:
            self.store.say(f"other data: not bit for bit. {now['data']}, were {before['data']}")
        if before["step_size"] != now["step_size"]:
            self.store.say(
                f"a step takes {now['step_size']} samples or batches, was {before['step_size']}: step "
                f"{before['step'] + 1} of the epoch becomes {place['step'] + 1}"
            )

    def _leave(self, number: int) -> None:
        """End this process, and every rank does."""
        self.request.taken = True
        self.store.agree(wait=True)
        where = f"epoch {self.epoch + 1}, step {self.step + 1}"
        if number == stop_signals.REJOIN:
            self.store.say(f"saved in {self.store.folder}, ends, to go on with more ranks from {where}")
            if self.team.rank == 0:
                supervised.leave_to_rejoin()
        else:
            if self.team.rank == 0:
                (self.store.folder / storage.INTERRUPTED).touch()
            name = signal.Signals(number).name
            self.store.say(f"{name}: saved in {self.store.folder}, ends. The same command goes on from {where}")
        self.team.barrier()
        sys.exit(0)
