# SPDX-License-Identifier: Apache-2.0
"""What a job knows of a model or an optimizer. It dies with the model, or with the job."""

from __future__ import annotations

import dataclasses
import itertools
import string
import threading
import weakref
from typing import Any


@dataclasses.dataclass
class ModelState:
    """What a job knows of a model.

    Attributes:
        synchronized: how many variables it had when replicas were made equal; None: they were not, or not since it was
            compiled or loaded weights.
        has_loaded: whether this rank has loaded weights since then.
        statistics_moved: grows with every model that trains on each rank's own data; 0: its statistics are averaged.
        step_modes: how the step functions that it holds were made.
        samples: this rank's in the last step of each kind, a number or a tensor; None: unknown.
        jit_compile: what the user has set, where it had to be changed; None: it was not.
        added_sums: which of the losses that its layers add are sums over samples, by their number in a step.
        takes_any_batch: whether it takes other batch sizes than its inputs say, by that size and its number of layers.
        step_was_tried: whether it is known that its own `train_step` gives gradients that ranks may average.
        metrics_were_tried: of which steps it is known what they give to metrics, as far as it can be.
        mixing_was_tried: whether it was asked if what it gives for a sample depends on other samples.
        settings_compared: whether ranks have compared what its layers were told beside weights.
        batches: how many steps `train_on_batch` has made.
        told_apart: whether the user was told that ranks have other weights.
        told_averaged: whether the user was told that arrays of layers of one's own are each rank's own.
        told_raw: whether the user was told that variables of TensorFlow among its attributes are each rank's own.
        early_start: its hooks that start reductions in backward (PyTorch).
        runner: computes it in parts (`spatial.run.Runner`); None: it does not, or nobody has asked yet.
        is_planned: whether it is known how it is computed.
        needs_whole_outputs: whether outputs of what is computed in parts are gathered in each step, for its losses.
        outputs_are_decided: whether its losses and metrics were asked for that since it was compiled.
        checked_calls: in how many calls ranks of a group have compared their samples.
        steps: how many training steps it made, for `check_replicas_every`.
    """

    synchronized: int | None = None
    has_loaded: bool = False
    statistics_moved: int = 0
    step_modes: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: dict[str, Any] = dataclasses.field(default_factory=dict)
    jit_compile: Any = None
    added_sums: set[int] = dataclasses.field(default_factory=set)
    takes_any_batch: dict[tuple[int, int], bool] = dataclasses.field(default_factory=dict)
    step_was_tried: bool = False
    metrics_were_tried: set[str] = dataclasses.field(default_factory=set)
    mixing_was_tried: bool = False
    settings_compared: bool = False
    batches: int = 0
    told_apart: bool = False
    told_averaged: bool = False
    told_raw: bool = False
    early_start: Any = None
    runner: Any = None
    is_planned: bool = False
    needs_whole_outputs: bool = False
    outputs_are_decided: bool = False
    checked_calls: int = 0
    steps: int = 0


@dataclasses.dataclass
class OptimizerState:
    """What a job knows of an optimizer.

    Attributes:
        synchronized: whether replicas of what it trains were made equal, or found so, in a loop of the user's own.
        in_segment: its plans whose tensors live in their segment, with whose gradients those are (PyTorch).
        delayed: its averages that come a step late, in the order of their first step.
        window: how many steps of the running `fit` are synchronous, and how many then are not.
        local: the weights that it trains in local steps; None: it makes none, or has not begun.
        local_mode: what the running local step of an optimizer of PyTorch has to do.
        restored: averages that an earlier process held back, by their place in `delayed`.
        shards: how its state is shared out among the ranks (`keras_hooks.sharded`); None: each rank has all of it.
        row_shapes: of the embeddings whose gradients come to it as rows (TensorFlow).
    """

    synchronized: bool = False
    in_segment: dict[tuple[Any, ...], tuple[Any, list[int]]] = dataclasses.field(default_factory=dict)
    delayed: list[Any] = dataclasses.field(default_factory=list)
    window: tuple[int, int] | None = None
    local: Any = None
    local_mode: Any = None
    restored: dict[int, Any] = dataclasses.field(default_factory=dict)
    shards: Any = None
    row_shapes: set[tuple[int, ...]] = dataclasses.field(default_factory=set)


class Known:
    """Everything that a job knows of the user's models, optimizers and layers.

    Attributes:
        teams: the number of the team that a model or optimizer was assigned to.
        clipped: who stands for the optimizer of variables whose gradients are clipped before it gets them, by the ids
            of the variables.
        numbers_of_samples: those that steps of the user's own have had, where JAX compiles for each.
        gone: the keys of those that do not exist any more.
        named: how many keys were given.
        has_failed: whether a call of a model has failed on this rank since ranks last agreed on `named`.
        names_told: whether rank 0 has told that ranks train models of different names.
    """

    def __init__(self) -> None:
        self.teams: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._models: weakref.WeakKeyDictionary[Any, ModelState] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Any, OptimizerState] = weakref.WeakKeyDictionary()
        self._keys: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._local_layers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._naming = threading.Lock()
        self._moves = itertools.count(1)
        self.clipped: dict[tuple[int, ...], Any] = {}
        self.numbers_of_samples: set[float] = set()
        self.gone: list[str] = []
        self.named = 0
        self.has_failed = False
        self.names_told = False

    def model(self, model: Any) -> ModelState:
        """Return the state of a model, or of a layer that is used as one."""
        return self._models.setdefault(model, ModelState())

    def optimizer(self, optimizer: Any) -> OptimizerState:
        """Return the state of an optimizer."""
        return self._optimizers.setdefault(optimizer, OptimizerState())

    def keep_local(self, layer: Any) -> None:
        """Remember a layer whose variables are each rank's own."""
        self._local_layers[layer] = True

    def local_layers(self) -> list[Any]:
        """Return the layers whose variables are each rank's own."""
        return [layer for layer, _ in _entries(self._local_layers)]

    def models(self) -> list[tuple[Any, ModelState]]:
        """Return the models that are known, with their states."""
        return _entries(self._models)

    def optimizers(self) -> list[tuple[Any, OptimizerState]]:
        """Return the optimizers that are known, with their states."""
        return _entries(self._optimizers)

    def key_of(self, owner: Any, kind: str) -> str:
        """Return the name of the plans of a model, optimizer or layer.

        They are counted by their first use, and a number is never given again: so the name is the same on every rank,
        whatever their garbage collectors do.
        """
        with self._naming:
            if owner not in self._keys:
                key = self._keys[owner] = f"{kind}{self.named}"
                self.named += 1
                weakref.finalize(owner, self.gone.append, key).atexit = False
            return self._keys[owner]

    def forget(self, model: Any, first: int) -> None:
        """Forget what one rank may know and another not, as a call of this model has failed.

        Args:
            model: the model. What the user has set for it stays, as how it is computed in parts.
            first: `named` when the call began. Keys that were given since are gone, with what is known of their owners,
                but for how the variables that they have made are shared out.
        """
        self.has_failed = True
        before = self.model(model)
        kept = "step_modes", "jit_compile", "runner", "is_planned", "needs_whole_outputs", "outputs_are_decided"
        self._models[model] = ModelState(**{name: getattr(before, name) for name in kept})
        for owner, key in _entries(self._keys):
            if int(key.lstrip(string.ascii_letters)) >= first:
                del self._keys[owner]
                if owner in self._optimizers:
                    self._optimizers[owner] = OptimizerState(shards=self._optimizers[owner].shards)

    def next_move(self) -> int:
        """Return a number larger than those before: the order in which models trained, the same on all ranks."""
        return next(self._moves)


def _entries(states: weakref.WeakKeyDictionary[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the keys and values of a dictionary to which other threads may add at the same time."""
    # `keyrefs` copies the keys at once, where `items` gives other threads time between any two of them.
    owners = (reference() for reference in states.keyrefs())
    return [(owner, states[owner]) for owner in owners if owner is not None]
