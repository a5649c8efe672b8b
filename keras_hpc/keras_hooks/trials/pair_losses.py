# SPDX-License-Identifier: Apache-2.0
"""Refuses losses that depend on all samples of a batch together: a rank has only its own part of them.

A function that returns a loss for each sample does not say whether other samples have a part in it, as the negatives of
a contrastive loss. With `init(batch="global")` it is asked, once: the losses of made-up samples are the same beside
other samples if each depends on its own sample alone.

A function that returns one number for a batch is asked whether it is the mean of what two halves of the batch give, or
their sum. A ratio of sums (Dice, masks of one's own), the root of a mean and a correlation are neither. So is one that
returns numbers for a batch, each of an output or a class: their mean is one number. Those whose numbers are not as many
again for as many samples again are such.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.keras_hooks.trials import made_up, unchanged

# Of the largest loss, in 32 and 64 bits: a term of little weight may mix samples, and a loss rounds less than a model.
_FINE_TOLERANCE = 1e-4
# Of what they were are predictions of the other samples, in each draw. A loss that is cut off at 0 may be 0 for all
# samples of one, and the same samples may be above the mean beside others that are alike.
_OTHERS = 1.0, 0.2, 8.0
# What targets without a value are marked with, for a mask, and of what they were are predictions of the second half, so
# that the halves have losses of their own. Small logits have not: a product of their means is nearly the mean.
_SECOND = (None, 0.2), (0.0, 0.2), (-1.0, 0.2), (None, 8.0)
REFUSED = (
    "{what} is neither a mean nor a sum over samples, but one number for a whole batch, as a ratio of sums, the root "
    "of a mean or a product of means is, and each rank has a part of the batch. So ranks cannot compute what one rank "
    'computes. With init(batch="global"), return a loss for each sample, of shape (batch,), as '
    'keras.losses.Dice(axis=(1, 2, 3)) does; or use batch="local". Received: {whole:.4g} for {of}, of whose halves one '
    "has {halves[0]:.4g} and the other one {halves[1]:.4g}"
)

_known: weakref.WeakSet[Any] = weakref.WeakSet()  # of which nobody needs to ask again
_of_batches: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # losses and metrics that were asked


def check(loss: Any, y_true: Any, y_pred: Any) -> None:
    """Ask a loss of the user's own, if it was not asked before. Without communication: ranks ask and find the same.

    Args:
        loss: a `keras.losses.Loss` that returns a value for each sample.
        y_true: what it gets in a step, of which only shapes and dtypes matter.
        y_pred: likewise.

    Raises:
        ValueError: other samples have a part in the loss of a sample.
    """
    if loss in _known or not _is_users(loss):
        return
    with backends.current().outside_programs(), unchanged.loss(loss):
        compares = depends_on_others(loss.call, loss.dtype, y_true, y_pred)
    if compares:
        raise ValueError(
            f"The loss `{loss.name}` gives a sample another loss beside other samples. So it compares the samples of a "
            "batch, of which each rank has a part, and ranks cannot compute what one rank computes. With "
            'init(batch="global"), return a loss for each sample that depends on this sample alone; or use '
            'batch="local". Received: losses that change beside other samples'
        )
    _known.add(loss)  # not one that was refused: it is refused again


def is_of_batch(asked: Any, y_true: Any, y_pred: Any) -> bool:
    """Return whether a loss or metric has numbers for a batch, as one for each output, and none for each sample.

    It is asked once. Without communication: ranks ask and find the same.

    Args:
        asked: a `keras.losses.Loss`, or a metric that is the mean of a function.
        y_true: what it gets in a step, of which only shapes and dtypes matter.
        y_pred: likewise.
    """
    if asked not in _of_batches:
        is_loss = isinstance(asked, keras.losses.Loss)
        given = getattr(asked, "_fn_kwargs", {})
        function = asked.call if is_loss else functools.partial(asked._fn, **given)
        owner = getattr(asked, "fn" if is_loss else "_fn", type(asked))
        # Of Keras' own functions only those can that reduce over another axis than the last.
        may = given.get("axis", -1) != -1 or not str(owner.__module__).startswith("keras.")
        with unchanged.loss(asked) if is_loss else contextlib.nullcontext():
            _of_batches[asked] = may and not _grows(function, asked.dtype, y_true, y_pred)
    return _of_batches[asked]


def _grows(function: Callable[..., Any], dtype: str, y_true: Any, y_pred: Any) -> bool:
    """Return whether a function gives more numbers for more samples, as it does if it gives no answer."""
    these, others = (_made_up((y_true, y_pred), seed) for seed in (0, 2))
    try:
        both = keras.tree.map_structure(lambda x, y: np.concatenate([x, y]), these, others)
        with backends.current().outside_programs():
            alone, beside = (_values(function, dtype, given) for given in (these, both))
    except Exception:  # noqa: BLE001  it may refuse made-up samples; what is wrong with it, the step raises again
        return True
    return alone.shape != beside.shape


def depends_on_others(function: Callable[..., Any], dtype: str, y_true: Any, y_pred: Any, axis: int = 0) -> bool:
    """Return whether a function gives something else for samples, or positions of them, beside others.

    If it gives no answer, as one that draws random numbers, it does not; but one that fails for a part of the positions
    needs all of them. Without communication.

    Args:
        function: of `y_true` and `y_pred`.
        dtype: what both are converted to.
        y_true: what it gets in a step, of which only shapes and dtypes matter.
        y_pred: likewise.
        axis: 0: of samples; 1 and more: of positions, for each of which there must be a value.
    """
    tolerance = made_up.tolerance_of([dtype], _FINE_TOLERANCE)
    for draw, scale in enumerate(_OTHERS):
        these, (targets, predictions) = (_made_up((y_true, y_pred), 4 * draw + more) for more in (0, 2))
        others = targets, keras.tree.map_structure(functools.partial(_scaled, scale), predictions)
        try:
            both = keras.tree.map_structure(lambda x, y: np.concatenate([x, y], axis), these, others)
            with backends.current().outside_programs():
                alone, again, beside = (_values(function, dtype, given) for given in (these, these, both))
        except Exception:  # noqa: BLE001  it may refuse made-up samples; what is wrong with it, it raises again
            return axis > 0  # weights of all positions, for instance, do not fit those of a part
        if alone.ndim <= axis or not np.array_equal(again, alone):
            return False  # no value for each, or not a number, or random
        if beside.shape != (*alone.shape[:axis], 2 * alone.shape[axis], *alone.shape[axis + 1 :]):
            return axis > 0
        here = np.take(beside, range(alone.shape[axis]), axis)
        if (abs(here - alone) > tolerance * abs(alone).max(initial=0)).any():
            return True
    return False


def check_number(loss: Any, y_true: Any, y_pred: Any, function: Callable[..., Any] | None = None) -> None:
    """Ask a loss that returns one number for a batch, if it was not asked before. Without communication.

    Args:
        loss: a `keras.losses.Loss`.
        y_true: what it gets in a step, of which only shapes and dtypes matter.
        y_pred: likewise.
        function: what the loss computes of them as they are, where it is not its `call`.

    Raises:
        ValueError: the number is neither the mean nor the sum of those of two halves.
    """
    if loss in _known:
        return
    with backends.current().outside_programs(), unchanged.loss(loss):
        answer = ask_number(function or loss.call, loss.dtype if function is None else None, y_true, y_pred)
    if answer.is_neither:
        what = f"The loss `{loss.name}`"
        raise ValueError(REFUSED.format(what=what, whole=answer.whole, halves=answer.halves, of="made-up samples"))
    _known.add(loss)


class Answer(NamedTuple):
    """What a function that returns one number for a batch says of made-up samples and of their halves."""

    is_sum: bool = False
    is_neither: bool = False
    whole: float = 0.0
    halves: Sequence[float] = ()


def ask_number(function: Callable[..., Any], dtype: str | None, y_true: Any, y_pred: Any) -> Answer:
    """Ask a function whether it returns a mean over samples, which it is if it does not answer. No communication.

    Of several numbers their mean is asked.

    Args:
        function: of `y_true` and `y_pred`.
        dtype: what both are converted to, if not None.
        y_true: what it gets in a step, of which only shapes and dtypes matter.
        y_pred: likewise.
    """
    sums: list[bool] = []
    others = (*made_up.MISSING, made_up.SIZES, 0.0, -1.0, *made_up.MISSING) if made_up.may_be_any() else ()
    scales = itertools.chain(itertools.repeat(0.2, len(made_up.MISSING) + 1), itertools.repeat(8.0))
    marks: list[tuple[Any, float]] = [*_SECOND, (made_up.SIGNS, 0.2), *zip(others, scales, strict=False)]
    for draw, (missing, scale) in enumerate(marks):
        first, (targets, predictions) = (_made_up((y_true, y_pred), 4 * draw + part) for part in (0, 2))
        if isinstance(missing, tuple):
            changes = [functools.partial(made_up.multiplied, factors, ()) for factors in missing]
            first = keras.tree.map_structure(changes[0], first[0]), first[1]
            targets = keras.tree.map_structure(changes[1], targets)
        else:
            targets = keras.tree.map_structure(functools.partial(made_up.without_a_value, missing), targets)
        second = targets, keras.tree.map_structure(functools.partial(_scaled, scale), predictions)
        try:
            both = keras.tree.map_structure(lambda x, y: np.concatenate([x, y]), first, second)
            with backends.current().outside_programs():
                whole, *halves, again = (
                    float(np.mean(_values(function, dtype, y))) for y in (both, first, second, first)
                )
        except Exception:  # noqa: BLE001  as above
            if not sums:
                return Answer()
            continue
        if not np.isfinite([whole, *halves]).all() or whole == sum(halves) == 0:
            continue  # as where predictions are to be probabilities
        if again != halves[0]:
            return Answer()  # random
        if missing is not None and made_up.is_left_out(whole, halves):
            continue
        if not adds_up(whole, halves, [dtype]):
            return Answer(is_neither=True, whole=whole, halves=halves)
        sums.append(abs(whole - sum(halves)) < abs(whole - sum(halves) / 2))
    return Answer(is_sum=bool(sums) and all(sums))


def adds_up(whole: float, halves: Sequence[float], dtypes: Iterable[Any]) -> bool:
    """Return whether the loss of a batch is the mean of those of its halves, or their sum.

    Args:
        whole: the loss of the batch.
        halves: those of its two halves, of as many samples.
        dtypes: what they were computed in.
    """
    limit = made_up.tolerance_of(dtypes) * max(abs(whole), *map(abs, halves))
    return any(abs(whole - total) <= limit for total in (sum(halves) / 2, sum(halves)))


def _scaled(scale: float, array: np.ndarray) -> np.ndarray:
    return array * array.dtype.type(scale) if array.dtype.kind == "f" else array


def _is_users(loss: Any) -> bool:
    if isinstance(loss, keras.losses.Circle):  # the one of Keras that compares
        return True
    of_keras = type(loss).__module__.startswith("keras.")
    function = getattr(loss, "fn", None)
    return not of_keras or (function is not None and not str(function.__module__).startswith("keras."))


def in_one_program(asked: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a loss or metric computes, on JAX as one program that goes away with it, if it is Keras' own.

    Each kind of operation that runs by itself is a program that stays, with its 1.6 MiB. Of the user's own, a program
    would not show whether it draws random numbers.

    Args:
        asked: a `keras.losses.Loss`, or a metric that is the mean of a function.
        function: what it computes.
    """
    owners = type(asked), getattr(asked, "fn", None), getattr(asked, "_fn", None)
    if keras.backend.backend() != "jax" or any(not _is_of_keras(owner) for owner in owners if owner is not None):
        return function
    import jax

    program: Callable[..., Any] = jax.jit(lambda *samples: function(*samples))  # a function that has no other program
    return program


def _is_of_keras(owner: Any) -> bool:
    return str(getattr(owner, "__module__", "")).startswith("keras.")


def _made_up(given: tuple[Any, Any], seed: int) -> tuple[Any, ...]:
    """Return samples like `y_true` and `y_pred`, which are not alike."""
    return tuple(
        keras.tree.map_structure(functools.partial(made_up.samples, seed=seed + number), y)
        for number, y in enumerate(given)
    )


def _values(function: Callable[..., Any], dtype: str | None, samples: tuple[Any, ...]) -> np.ndarray:
    tensors = keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=dtype), samples)
    values: np.ndarray = backends.current().to_numpy(function(*tensors))
    return values.astype(np.float64)
