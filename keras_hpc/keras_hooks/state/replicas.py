# SPDX-License-Identifier: Apache-2.0
"""Replicas of a model: makes them equal, averages what each rank took from its own data, and compares them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import xxhash

from keras_hpc.errors import ReplicaMismatchError
from keras_hpc.job import current, log
from keras_hpc.keras_hooks.sharded import whole
from keras_hpc.keras_hooks.state import layer_states, raw_variables, rows, settings
from keras_hpc.keras_hooks.state.variables import (
    accumulators,
    average,
    broadcast_variables,
    check_same,
    common_buffers,
    digests,
    held_optimizers,
    known_apart,
    optimizers_of,
    per_rank_state,
    replicated_variables,
    seed_generators,
    sharded_slots,
    unique,
    waiting,
)


def install(job: Any, patcher: Any) -> None:
    """Notices weights that are loaded: a rank may load them alone."""

    def notice_weights(original: Any) -> Any:
        @functools.wraps(original)
        def load_weights(model: Any, *args: Any, **kwargs: Any) -> Any:
            original(model, *args, **kwargs)
            loaded = set(map(id, model.variables))
            job.known.model(model)  # which may be new
            for other, state in job.known.models():
                if not loaded.isdisjoint(map(id, other.variables)):
                    state.synchronized, state.has_loaded = None, True

        return load_weights

    patcher.patch(keras.Model, "load_weights", notice_weights)
    patcher.patch(keras.saving, "load_weights", notice_weights)


def is_synchronized(owner: Any) -> bool:
    """Return whether replicas were made equal: of a model with all the variables that it has now, or an optimizer."""
    known = current.job().known
    if not isinstance(owner, keras.Model):
        return known.optimizer(owner).synchronized
    return known.model(owner).synchronized == len(replicated_variables(owner))


def was_synchronized(model: Any) -> bool:
    """Return whether replicas of a model were made equal since it was compiled or loaded weights."""
    return current.job().known.model(model).synchronized is not None


def differ_in_kind(model: Any) -> bool:
    """Return whether the ranks have built different variables of a model so far. Collective on its team."""
    shapes = [f"{keras.backend.standardize_dtype(v.dtype)}{list(v.shape)}" for v in replicated_variables(model)]
    digest = xxhash.xxh3_128_hexdigest(" ".join(shapes).encode())
    return len(set(current.team_of(model).allgather_object(digest, "Model.fit()"))) > 1


def synchronize(model: Any) -> bool:
    """Give all ranks the root's variables. Collective on the model's team.

    Args:
        model: a model; what is not built yet is left out.

    Returns:
        Whether replicas differed; the same on all ranks.

    Raises:
        PlanMismatchError: the ranks built different models.
    """
    team = current.team_of(model)
    whole.check_loaded_alike(model)
    settings.check(model)
    seeds = [generator.state for generator in seed_generators(model)]
    apart = known_apart()
    shared = [v for v in (*replicated_variables(model), *accumulators(model), *seeds) if id(v) not in apart]
    differed = broadcast_variables(team, [*shared, *common_buffers(model)])
    derive(model)
    state = current.job().known.model(model)
    state.synchronized, state.has_loaded = len(replicated_variables(model)), False
    state.statistics_moved = 0
    for optimizer in optimizers_of(model):
        current.job().known.optimizer(optimizer).synchronized = True
    return differed


def derive(layer: Any) -> None:
    """Compute anew what layers keep beside their weights, which have other values now: as Keras when it loads them."""
    for inner in layer._flatten_layers():
        if isinstance(inner, keras.layers.Normalization) and inner.built and inner.input_mean is None:
            inner.finalize_state()


def synchronize_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Give all ranks the root's values of an optimizer and of what it trains, in a user's own loop. Collective."""
    own = known_apart() | set(map(id, sharded_slots(optimizer)))
    shared = [variable for variable in unique([*variables, *optimizer.variables]) if id(variable) not in own]
    broadcast_variables(current.team_of(optimizer), shared)
    current.job().known.optimizer(optimizer).synchronized = True


def check_equal(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise if variables differ between ranks before an optimizer's first update. Collective on its team.

    For loops of the user's own where it is too late to make them equal: on JAX their state is an argument of the traced
    function, and on PyTorch gradients were computed with them.
    """
    team = current.team_of(optimizer)
    # `value` would be that of the trace; during `fit` there is none, and `fit` made replicas equal.
    variables = [variable for variable in variables if _value(variable) is not None]
    # Gradients that wait for more micro-batches are each rank's own; a checkpoint may have brought them.
    own = {id(v) for one in (optimizer, *held_optimizers(optimizer)) for v in waiting(one)} | known_apart()
    own |= set(map(id, sharded_slots(optimizer)))
    variables = [variable for variable in variables if id(variable) not in own]
    check_same(team, variables)
    everyone = team.allgather(digests([_value(variable) for variable in variables])[None])
    for rank, theirs in enumerate(everyone):
        different = [v for v, a, b in zip(variables, everyone[0], theirs, strict=True) if (a != b).any()]
        if different:
            raise ValueError(
                "In a training loop of your own, replicas must start from equal weights: call "
                "keras_hpc.broadcast(model) before it, or keras.utils.set_random_seed(seed) with the same seed on "
                "every rank before the model is made, or load the same weights on every rank. "
                f"Received: `{_path(different[0])}` differs between rank 0 and rank {rank} of the team"
            )
    current.job().known.optimizer(optimizer).synchronized = True


def _value(variable: Any) -> Any:
    """Return the value of a Keras variable, or of a parameter of PyTorch."""
    return getattr(variable, "_value", variable)


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", f"a parameter of shape {tuple(variable.shape)}"))


def mark_statistics_local(model: Any) -> None:
    """Remember that each rank trained the model on its own data."""
    known = current.job().known
    known.model(model).statistics_moved = known.next_move()


def average_statistics(model: Any) -> None:
    """Average the per-rank state of a model if it was trained since the last time. Collective on the model's team.

    So it does with gradients that wait for more micro-batches: their mean over ranks is what one rank would hold.
    """
    moved = sorted(
        ((state.statistics_moved, m, state) for m, state in current.job().known.models() if state.statistics_moved),
        key=lambda entry: entry[0],
    )
    if not moved:
        return
    own = set(map(id, per_rank_state(model)))
    related = [(m, s) for _, m, s in moved if m is model or not own.isdisjoint(map(id, per_rank_state(m)))]
    if not related:
        return
    for _, state in related:
        state.statistics_moved = 0
    for m, _ in related:
        _say_what_is_averaged(m)
    kept = unique(v for m, _ in related for v in (*per_rank_state(m), *accumulators(m)))
    average(current.team_of(model), [*kept, *(buffer for m, _ in related for buffer in common_buffers(m))])


def average_after_step(model: Any) -> None:
    """Average what a step of `train_on_batch` moved, but not gradients that wait for more. Collective.

    Moving averages are linear: averaging now gives what averaging before evaluate or save would give. But this way
    `if rank() == 0: model.save(...)` needs no other rank.
    """
    variables = [*per_rank_state(model), *common_buffers(model)]
    if current.team_of(model).schedule.local is not None:
        return  # local steps send nothing: with the weights, before ranks look at them
    if variables:
        batches = current.job().known.model(model).batches
        if (batches + 1) & batches == 0:  # as `after_batch`, which counts the step
            _say_what_is_averaged(model)
        average(current.team_of(model), variables)
    if not accumulators(model):
        current.job().known.model(model).statistics_moved = 0


def _say_what_is_averaged(model: Any) -> None:
    """Warn once of arrays of the user's own layers that ranks have moved apart. Collective on the model's team.

    Their mean is what one rank has of averages over samples, about; of features of earlier batches it is nothing.
    """
    team, state = current.team_of(model), current.job().known.model(model)
    if state.told_averaged or team.size == 1 or team.schedule.local is not None or current.job().virtual is not None:
        return
    arrays = layer_states.averaged(model)
    if not arrays:
        return
    everyone = team.allgather(digests(arrays)[None], "arrays of layers, for keras_hpc to compare")
    apart = [v.path for v, theirs in zip(arrays, everyone.swapaxes(0, 1), strict=True) if (theirs != theirs[0]).any()]
    if not apart:
        return
    state.told_averaged = True
    if team.rank == 0:
        log.warning(
            f"model `{model.name}`: each rank moves arrays that layers of your own keep by its own samples, and they "
            "become the mean of all ranks now and then, as at the end of an epoch: not what one rank has. Where they "
            'move by means over samples, make them by add_weight(..., trainable=False, aggregation="mean"), where by '
            'sums over samples "sum": then each step moves them as on one rank. Features of earlier batches stay each '
            f"rank's own by keras_hpc.keep_local(layer). Received: {', '.join(apart)}"
        )


def has_waiting_gradients(model: Any) -> bool:
    """Return whether `train_on_batch`, or a loop, has left gradients that wait for more micro-batches."""
    return bool(current.job().known.model(model).statistics_moved and accumulators(model))


def average_waiting_gradients(model: Any) -> None:
    """Make gradients that wait for more micro-batches what one rank would hold. Collective on the model's team.

    Each rank's are of its own samples: those of the root are not what all have gathered.
    """
    average(current.team_of(model), accumulators(model))


def agree(model: Any, call: str) -> None:
    """Make replicas equal before a call of `evaluate` or `predict`, where they are not. Collective.

    Weights that differ become the root's: it may have loaded them alone. Statistics that differ become their mean, if
    no rank alone has loaded some: a loop of the user's own has trained on each rank's part of the data.

    Args:
        model: the model; what is not built yet is left out.
        call: its name, for the message where another rank calls something else.
    """
    team = current.team_of(model)
    rows.align(model, team, f"Model.{call}()")
    statistics = per_rank_state(model)
    own = set(map(id, statistics))
    statistics = [*statistics, *common_buffers(model)]
    weights = [v for v in (*replicated_variables(model), *accumulators(model)) if id(v) not in own]
    state = current.job().known.model(model)
    mine = [xxhash.xxh3_128_hexdigest(digests(part).tobytes()) for part in (weights, statistics)]
    everyone = team.allgather_object([*mine, state.has_loaded], f"Model.{call}()")
    weights_of, statistics_of, loaded = zip(*everyone, strict=True)
    differ, statistics_differ, some_loaded = (len(set(theirs)) > 1 for theirs in (weights_of, statistics_of, loaded))
    if differ and not some_loaded and not state.told_apart:
        # Nobody knows who has set them: a loop without an optimizer of Keras, as with optax, trains unseen.
        state.told_apart = True
        if team.rank == 0:
            log.warning(
                f"model `{model.name}`: weights differ between ranks before Model.{call}(), and become those of rank "
                "0. That is right where rank 0 alone has set them. If training has moved them apart, the ranks have "
                "trained different networks: what a loop does by its loss or its data, as a learning rate, or a "
                "gradient that it applies itself or by optax, must come out alike on all ranks (keras_hpc.allreduce)"
            )
    if differ or (statistics_differ and some_loaded):
        synchronize(model)
    elif statistics_differ:
        _say_what_is_averaged(model)
        average(team, statistics)
        derive(model)
    state.synchronized, state.has_loaded = len(replicated_variables(model)), False


def compare(team: Any, variables: Sequence[Any], values: Sequence[Any], when: str = "") -> None:
    """Raise on all ranks if values differ between them, naming the first variable. Collective on the team.

    Args:
        team: whose ranks compare.
        variables: as many and of the same shapes on every rank.
        values: theirs, tensors of the backend.
        when: for the message.

    Raises:
        ReplicaMismatchError: they differ.
    """
    everyone = team.allgather(digests(values)[None])
    for i, variable in enumerate(variables):
        theirs = everyone[:, i]
        if (theirs == theirs[0]).all():
            continue
        alike = [int((theirs == mine).all(axis=1).sum()) for mine in theirs]
        right = int(np.argmax(alike))  # one of the majority; of two halves, the lower rank
        odd = np.flatnonzero((theirs != theirs[right]).any(axis=1)).tolist()
        raise ReplicaMismatchError(
            f"The replicas differ{when}: variable {variable.path!r} holds other values on rank "
            f"{', '.join(map(str, odd))} than on the other{'s' * (team.size - len(odd) > 1)}."
        )


def after_batch(model: Any) -> None:
    """Warn once of weights that ranks have moved apart in `train_on_batch`. Collective on the model's team.

    Not after each step, which would cost as much as the step: after the first, and whenever their number has doubled.

    Args:
        model: the model.
    """
    state = current.job().known.model(model)
    state.batches += 1
    if state.batches & (state.batches - 1) == 0 and current.team_of(model).schedule.local is None:
        warn_if_apart(model, f" after {state.batches} steps of train_on_batch")


def warn_if_apart(model: Any, when: str) -> None:
    """Warn once of weights that ranks have moved apart, each by what only it knows. Collective on the model's team.

    Optimizers move all ranks' weights alike, where their learning rates are alike. A step or a callback of the user's
    own may move them without one.

    Args:
        model: the model.
        when: for the message.
    """
    state, team = current.job().known.model(model), current.team_of(model)
    rows.align(model, team, f"weights that are compared{when}")
    raw_variables.warn_if_apart(model)
    if state.told_apart or team.size == 1:
        return
    trained, apart = set(map(id, model.trainable_variables)), known_apart()
    weights = [v for v in replicated_variables(model) if id(v) in trained and id(v) not in apart]
    try:
        compare(team, weights, [variable._value for variable in weights], when)
    except ReplicaMismatchError as error:
        state.told_apart = True
        if team.rank == 0:
            log.warning(
                f"model `{model.name}`: {error} What a loop, a `train_step` or a callback changes, weights or a "
                "learning rate, must come out alike on all ranks. Where it depends on samples, as a loss does, average "
                "first: gradients = keras_hpc.allreduce(gradients)"
            )


def after_step(model: Any, results: Any) -> None:
    """Compare the replicas of a model every so many of its steps, if `init` was told so. Collective on its team.

    Statistics that each rank takes from its own data are left out: they become alike at the end of an epoch.

    Args:
        model: the model.
        results: of its train function; on JAX, they hold the state.
    """
    job = current.job()
    every = job.check_replicas_every
    if every is None:
        return
    state = job.known.model(model)
    before = state.steps
    state.steps = now = before + model.steps_per_execution
    if before // every == now // every:
        return
    team = current.team_of(model)
    rows.align(model, team, f"replicas that are compared after step {now}")
    own = set(map(id, per_rank_state(model)))
    if team.schedule.local is not None:  # of local steps JAX does not know yet whether they were
        own |= set(map(id, model.trainable_variables))
        own |= {id(variable) for optimizer in optimizers_of(model) for variable in optimizer.variables}
    wanted = [variable for variable in replicated_variables(model) if id(variable) not in own]
    held = _values_in(model, results)
    # The optimizer of another model may be among its attributes: what a step does not move, is what it was.
    values = {id(variable): held.get(id(variable), variable._value) for variable in wanted}
    known = [variable for variable in wanted if values[id(variable)] is not None]
    compare(team, known, [values[id(variable)] for variable in known], f" after step {now}")


def _values_in(model: Any, results: Any) -> dict[int, Any]:
    """Return the values of variables that are not in them: on JAX, steps hand their state on."""
    if keras.backend.backend() != "jax":
        return {}
    trainable, non_trainable, optimizer, _ = results[1]
    variables = [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]
    return {id(v): value for v, value in zip(variables, [*trainable, *non_trainable, *optimizer], strict=True)}
