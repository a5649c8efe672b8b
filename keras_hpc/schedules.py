# SPDX-License-Identifier: Apache-2.0
"""Learning rates for large batches: warm-up with polynomial decay, and how a rate grows with the number of ranks."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from keras_hpc.job import current


@keras.saving.register_keras_serializable(package="keras_hpc")
class WarmupPolynomial(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """Rises linearly to a peak, then falls as a polynomial to a floor, and stays there.

    For step s of S, with w steps of warm-up,

        s < w:   initial + (peak - initial) s / w
        else:    (peak - end) (1 - (s - w) / (S - w))^power + end

    The polynomial of degree 2 is the one that LARS was published with (arXiv:1708.03888). It ends at a floor, because
    the last epochs of one that ends at 0 train nothing.

    Args:
        peak_learning_rate: reached after the warm-up.
        total_steps: S, all steps of the training, the warm-up included. Keras counts each micro-batch of
            `gradient_accumulation_steps` as one.
        warmup_steps: w.
        initial_learning_rate: at step 0, if there is a warm-up.
        end_learning_rate: the floor. None: a thousandth of the peak.
        power: degree of the polynomial.

    Raises:
        ValueError: unless 0 <= warmup_steps < total_steps, and rates and power are not negative.

    Example:
    >>> schedule = WarmupPolynomial(1.0, total_steps=100, warmup_steps=20)
    >>> [round(float(schedule(step)), 3) for step in (0, 10, 20, 60, 100, 200)]
    [0.0, 0.5, 1.0, 0.251, 0.001, 0.001]
    """

    def __init__(
        self,
        peak_learning_rate: float,
        total_steps: int,
        warmup_steps: int = 0,
        initial_learning_rate: float = 0.0,
        end_learning_rate: float | None = None,
        power: float = 2.0,
    ) -> None:
        super().__init__()
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                "The warm-up is a part of the training. Expected 0 <= warmup_steps < total_steps. "
                f"Received: warmup_steps={warmup_steps}, total_steps={total_steps}"
            )
        end = peak_learning_rate / 1000 if end_learning_rate is None else end_learning_rate
        if not all(0 <= value < math.inf for value in (peak_learning_rate, initial_learning_rate, end, power)):
            raise ValueError(
                "Expected rates and a power that are numbers, not negative. "
                f"Received: peak_learning_rate={peak_learning_rate}, initial_learning_rate={initial_learning_rate}, "
                f"end_learning_rate={end}, power={power}"
            )
        self.peak_learning_rate = peak_learning_rate
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.initial_learning_rate = initial_learning_rate
        self.end_learning_rate = end
        self.power = power

    def __call__(self, step: Any) -> Any:
        """Return the rate of a step, a scalar of float32."""
        step = ops.cast(step, "float32")
        risen = ops.minimum(step / max(self.warmup_steps, 1), 1.0)
        up = self.initial_learning_rate + (self.peak_learning_rate - self.initial_learning_rate) * risen
        fallen = ops.clip((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 0.0, 1.0)
        down = (self.peak_learning_rate - self.end_learning_rate) * (1 - fallen) ** self.power + self.end_learning_rate
        return ops.where(step < self.warmup_steps, up, down)

    def get_config(self) -> dict[str, Any]:
        """Return what the schedule is made from."""
        names = (
            "peak_learning_rate",
            "total_steps",
            "warmup_steps",
            "initial_learning_rate",
            "end_learning_rate",
            "power",
        )
        return {name: getattr(self, name) for name in names}


def linear_scaling(learning_rate: float, factor: float | None = None) -> float:
    """Return the rate for a batch that is `factor` times as large: as many times the rate (Goyal et al., 2017).

    Args:
        learning_rate: that works for one rank.
        factor: None: `keras_hpc.group_count()`, and 1 before `init()`.

    Example, on two ranks:

    >>> linear_scaling(0.01), linear_scaling(0.01, factor=16)
    (0.02, 0.16)
    """
    return learning_rate * _factor(factor)


def square_root_scaling(learning_rate: float, factor: float | None = None) -> float:
    """Return the rate for a batch that is `factor` times as large, so that noise stays alike (Krizhevsky, 2014).

    Args:
        learning_rate: that works for one rank.
        factor: None: `keras_hpc.group_count()`, and 1 before `init()`.

    Example:
    >>> square_root_scaling(0.01, factor=16)
    0.04
    """
    return learning_rate * math.sqrt(_factor(factor))


def _factor(factor: float | None) -> float:
    if factor is None:
        return current.replicas()
    if not 0 < factor < math.inf:
        raise ValueError(f"The batch grows by a factor. Expected a positive number. Received: factor={factor}")
    return factor
