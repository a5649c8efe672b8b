# SPDX-License-Identifier: Apache-2.0
"""Finds out whether ranks that average the gradients of a step of the user's own compute what one rank would.

With `init(batch="global")` they must, but a `train_step` or `compute_loss` of the user's own does not say whether its
loss is a mean or a sum over samples. So the step is tried before training, without updating anything: on made-up
samples, as one of two ranks that both have them, and on the same samples twice, as one rank that has all of them. Its
gradients must be the same. Of a ratio of sums or the root of a mean they are, too. So the step is also tried on other
samples and on both: the gradients of both must be the mean of those of each, also where numbers that are zero before
training have grown (see later_steps.py). And if gradients were very large where they are computed, the optimizer must
get as large ones: a step that clips them clips those of each rank, where one rank clips their mean (see clipping.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_hpc.job import current, log
from keras_hpc.keras_hooks import keras_private, running
from keras_hpc.keras_hooks.trials import calm, later_steps, made_up, metric_kinds, tries
from keras_hpc.keras_hooks.trials.tries import Tries

# Where a step draws random numbers, a mean over twice the samples is up to sqrt(2) times smaller, and so is a sum.
_NOISY_SUM = 1.2, 3.0
_DRAWS, _MOST_DRAWS = 16, 512
_SURE = 4  # standard errors between a ratio and the limits above, so that chance gives no verdict
_LARGE = 2.0**16  # times the gradients of made-up samples, any limit is exceeded
_ROUNDED = 4  # times what samples that differ by rounding change, gradients are apart by rounding
_FINE, _UNKNOWN, _NEITHER, _LATER, _TOGETHER, _SUM = range(6)
_SHOWN = 200  # characters of an error


def is_keras_own(model: Any) -> bool:
    """Return whether a model trains with the `train_step` of Keras."""
    return has_own(model, "train_step")


def has_own(model: Any, method: str) -> bool:
    """Return whether a method of a model is that of Keras; so it is if neither has one."""
    own = getattr(keras_private.backend_trainer(), method, None)
    return getattr(getattr(model, method, None), "__func__", None) is own


def has_keras_loss(model: Any) -> bool:
    """Return whether a model computes its loss as Keras does."""
    return has_own(model, "compute_loss") and has_own(model, "compute_loss_and_updates")  # the second one on JAX only


def check(model: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Try the step of a model before its first one in a `fit`, once. Collective on its team.

    Args:
        model: a model whose replicas are equal.
        arguments: of its train function: on JAX the state, then this rank's batches.

    Returns:
        The arguments, with nothing taken from the batches.

    Raises:
        ValueError: on all ranks, if averages of its gradients would not be those of one rank.
    """
    call = running.call()
    this, state = current.job(), current.job().known.model(model)
    in_fit = call is not None and call.kind == "fit"
    if not in_fit or state.step_was_tried or this.batch != "global" or this.size == 1:
        return arguments
    if is_keras_own(model) and has_keras_loss(model):
        return arguments
    state.step_was_tried = True
    rest, batch, arguments = tries.look_at(arguments)
    told = metric_kinds.of_model(model)
    *verdict, kinds, why = _verdict(model, rest, batch)
    everyone = np.array([*verdict, *(kinds or [metric_kinds.UNKNOWN] * len(told))], np.float64)
    team = current.team_of(model)
    team.allreduce(everyone, op="max", what="what a train_step does")
    _report(model, int(everyone[0]), everyone[1], why)
    found = everyone[3:].astype(int).tolist()
    metric_kinds.tell(model, "train_step", told, found)
    if everyone[2] and team.rank == 0:
        log.warning(
            f"`{type(model).__name__}.train_step()` limits gradients before the optimizer gets them: each rank its "
            "own, where one rank would limit their mean. For the numbers of one rank give the optimizer `clipnorm`, "
            "`global_clipnorm` or `clipvalue`, or take the mean first: gradients = keras_hpc.allreduce(gradients)"
        )
    return arguments


def _report(model: Any, verdict: int, ratio: float, why: str) -> None:
    what = f"`{type(model).__name__}.{'compute_loss' if is_keras_own(model) else 'train_step'}()`"
    if verdict == _UNKNOWN:
        current.notice(f"{what}: its gradients are averaged over ranks, which is right if its loss is a mean{why}")
    elif verdict != _FINE:
        kind = "a sum" if verdict == _SUM else "neither a mean nor a sum"
        found = f"that are {ratio:.3g} times as large for twice as many samples on one rank as on two"
        if verdict in (_TOGETHER, _LATER):
            found = (
                "of a batch that are not the mean of those of its halves, as of a ratio of sums or the root of a mean"
            )
        if verdict == _LATER:
            kind, found = "no mean", f"{found}, once what is zero now has grown: {why}"
        raise ValueError(
            f"The gradients of {what} are {kind} over samples, and ranks take their mean. With "
            'init(batch="global"), compute the loss with a keras.losses.Loss or divide it by the number of samples, as '
            f'keras.ops.mean does; or use batch="local". Received: gradients {found}'
        )


def _verdict(model: Any, rest: list[Any], batch: Any) -> tuple[int, float, bool, list[int], str]:
    """Return what the step does, the ratio that says so, whether it limits gradients, and what its metrics get.

    Last comes why nobody knows, for a notice, if an error is why; or what must grow before gradients are no mean.
    """
    if not all(layer.built for layer in model._flatten_layers()):
        return _UNKNOWN, 0.0, False, [], ""
    try:
        with tries.unchanged_model(model):
            with calm.layers():
                norms, noisy, kinds, adds_up, limits, grown = _without_chance(model, rest, batch)
            if noisy:
                norms, kinds = _by_chance(model, rest, batch)
    except Exception as error:  # noqa: BLE001  it may refuse made-up samples; what is wrong with it, it raises again
        text = next(iter(str(error).splitlines()), "")[:_SHOWN]
        return _UNKNOWN, 0.0, False, [], f" (made-up samples could not tell: {type(error).__name__}: {text})"
    # What limits gradients makes no means of them, whatever the loss.
    together = _TOGETHER if adds_up is False else _LATER if grown else _FINE
    found = (_FINE if limits else together), 1.0
    for ours, theirs in zip(*(np.sqrt(np.mean(of_draws**2, axis=0)) for of_draws in norms), strict=True):
        if not ours > 0 or not np.isfinite([ours, theirs]).all():
            continue
        ratio = float(theirs / ours)
        if noisy:
            low, high = _NOISY_SUM
            verdict = _FINE if ratio < low else _SUM if ratio < high else _UNKNOWN
        else:
            verdict = next((v for v, r in ((_FINE, 1), (_SUM, 2)) if abs(ratio - r) < made_up.TOLERANCE), _NEITHER)
        found = max(found, (verdict, ratio))
    return (*found, limits, kinds, ", ".join(grown))


def _without_chance(
    model: Any, rest: list[Any], batch: Any
) -> tuple[list[np.ndarray], bool, list[int], bool | None, bool, list[str]]:
    """Return what steps give that draw constants only.

    Returns:
        The norms of the gradients of one of two ranks, and of one rank that has the samples of both; whether they are
        random all the same; what metrics get; whether gradients add up (None: nobody knows); whether they are limited;
        what must grow before they do not add up.
    """
    samples = made_up.batch(batch)
    trials = _Trials(model, rest, samples)
    norms = trials.norms(2)
    noisy = any((of_draws != of_draws[0]).any() for of_draws in norms)
    metrics, kinds, adds_up, limits, grown = metric_kinds.of_model(model), trials.kinds(), None, False, []
    # Parts of a batch say what ranks do, but not where a step draws numbers or asks all ranks.
    if not noisy and not trials.alone.communicates:
        adds_up, moved = _adds_up(trials, batch)
        limit = tries.tolerance(model)
        kinds = metric_kinds.checked_in(moved, metrics, kinds, limit)
        grown = _stop_adding_up(trials, batch) if adds_up else []
    if not is_keras_own(model):
        large = _Trials(model, rest, samples, _LARGE)
        _, of_large = large.norms(_DRAWS if noisy else 2)
        # Those of each sample that are limited by themselves have a mean like any other.
        limits = _are_limited(of_large / _LARGE, norms[1]) and not (adds_up and _adds_up(large, batch)[0])
    return norms, noisy, kinds, adds_up, limits, grown


def _by_chance(model: Any, rest: list[Any], batch: Any) -> tuple[list[np.ndarray], list[int]]:
    """Return the same norms, of as many draws as tell them apart, and what metrics get."""
    trials = _Trials(model, rest, made_up.batch(batch))
    norms = trials.norms(_DRAWS)
    while len(norms[0]) < _MOST_DRAWS and not _sure(*norms):
        norms = [np.concatenate(pair) for pair in zip(norms, trials.norms(_DRAWS), strict=True)]
    return norms, trials.kinds()


class _Trials:
    """Trials of a step on samples: as one of two ranks that both have them, and as one rank that has them twice."""

    def __init__(self, model: Any, rest: list[Any], samples: Any, factor: float = 1.0) -> None:
        self.model, self.samples = model, samples
        self.rank = Tries(model, rest, tries.twin_step(model), factor)
        self.alone = Tries(model, rest, None, factor)

    def norms(self, draws: int) -> list[np.ndarray]:
        """Return, for each draw, the norm of the gradients of each `apply`, of both."""
        return [self.rank.norms(self.samples, draws), self.alone.norms(tries.joined(self.samples, self.samples), draws)]

    def kinds(self) -> list[int]:
        """Return what metrics get."""
        metrics = metric_kinds.of_model(self.model)
        return [metric_kinds.kind_of(metric, self.rank.moved, self.alone.moved) for metric in metrics]


def _are_limited(large: np.ndarray, alone: np.ndarray) -> bool:
    """Return whether very large gradients were smaller when they came to the optimizer."""
    if large.shape != alone.shape:
        return False
    return bool((np.mean(large**2, axis=0) < 0.25 * np.mean(alone**2, axis=0)).any())


def _sure(one_of_two: np.ndarray, alone: np.ndarray) -> bool:
    """Return whether more draws are not likely to move the ratio of these norms across a limit."""
    squares = np.stack([one_of_two, alone]) ** 2
    mean = np.maximum(squares.mean(axis=1), np.finfo(float).tiny)
    error = 0.5 * np.sqrt(np.sum(squares.var(axis=1) / mean**2, axis=0) / len(alone))  # of the ratio's logarithm
    distance = np.abs(0.5 * np.log(mean[1] / mean[0]) - np.log(_NOISY_SUM)[:, np.newaxis])
    return bool(((distance > _SURE * error) | ~np.isfinite(error)).all())


@np.errstate(invalid="ignore")  # made-up samples may give infinities
def _adds_up(trials: _Trials, batch: Any) -> tuple[bool, list[Sequence[dict[int, Any]]]]:
    """Return whether the gradients of two parts of a batch have those of the batch as their mean.

    And by how much variables of metrics have moved for each part, and for both together, of each batch.
    """
    rank, alone, found = trials.rank, trials.alone, True
    moved: list[Sequence[dict[int, Any]]] = []
    for number, parts in enumerate(tries.pairs_of_parts(rank, trials.samples, batch)):
        try:
            halves, of_parts = [], []
            for part in parts:
                halves.append(rank.projections(part))
                of_parts.append(rank.last)
            whole = alone.projections(tries.joined(*parts))
        except Exception:
            if not number:
                raise
            continue  # it may refuse numbers below zero, and those that are none
        moved.append([*of_parts, alone.last])
        shapes = {of_gradients.shape for of_gradients in (*halves, whole)}
        if number and (len(shapes) > 1 or made_up.is_left_out(whole, halves)):
            continue  # nothing is updated, or by zeros, where a loss is no number
        largest = np.abs([*halves, whole]).max(axis=(0, 2), initial=0)
        limits = tries.tolerance(trials.model) * largest
        apart = np.abs(sum(halves) / 2 - whole).max(axis=1, initial=0)
        if (apart > limits).any():  # of small differences of large numbers, as finite ones, only rounding may be left
            rounding = [rank.projections(made_up.nudged(part)) - half for part, half in zip(parts, halves, strict=True)]
            rounded = _ROUNDED * np.abs(rounding).max(axis=(0, 2), initial=0)
            limits = np.maximum(limits, np.minimum(rounded, made_up.TOLERANCE * largest))
        found = found and not (apart > limits).any()
    return found, moved


def _stop_adding_up(trials: _Trials, batch: Any) -> list[str]:
    """Return names of what must grow before the gradients of two parts of a batch do not add up; none if they do."""
    try:
        with later_steps.state(trials.model, trials.rank, trials.alone) as grown:
            return grown if grown and not _adds_up(trials, batch)[0] else []
    except Exception:  # noqa: BLE001  it may not take such numbers, as an index; what else is known of it stays so
        return []
