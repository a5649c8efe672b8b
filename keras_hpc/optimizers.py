# SPDX-License-Identifier: Apache-2.0
"""Optimizers for large batches. LAMB is Keras' own: `keras.optimizers.Lamb`."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_hpc")
class LARS(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Layer-wise adaptive rate scaling: each weight tensor moves by a fixed share of its norm (You et al., 2017).

    For a weight w, its gradient g, momentum m, decay b and trust coefficient eta

        lambda = eta |w| / (|g| + b |w| + epsilon)        1 where |w| or |g| is 0
        v <- m v + learning_rate lambda (g + b w)
        w <- w - v

    Tensors of less than two dimensions (biases, BatchNormalization) take part without lambda and without decay. Norms
    are taken in float32, of gradients that are averaged over ranks already, so every rank finds the same lambda. The
    learning rates that go with it are large: with eta = 0.001, 2 to 10 for small batches, 40 for 32,768 images
    (arXiv:1708.03888). Warm up: `keras_hpc.schedules.WarmupPolynomial`.

    Args:
        learning_rate: a number or a `keras.optimizers.schedules.LearningRateSchedule`.
        momentum: m, 0 to 1.
        trust_coefficient: eta, positive.
        lars_weight_decay: b; not Keras' `weight_decay`, which would not pass through lambda.
        epsilon: added to the denominator.
        nesterov: take the step from where momentum will lead.
        clip: lambda is at most 1, so that no step is longer than SGD's. (LARC is another rule: its steps have the
            rate min(learning_rate, lambda).)
        name: of the optimizer.
        **kwargs: as for every Keras optimizer: `clipnorm`, `use_ema`, `loss_scale_factor`,
            `gradient_accumulation_steps` and others; without `weight_decay`.

    Raises:
        ValueError: an argument is out of range, or `weight_decay` was given.

    Example:
    ```python
    rate = keras_hpc.schedules.WarmupPolynomial(peak_learning_rate=5.0, total_steps=2000, warmup_steps=200)
    model.compile(keras_hpc.optimizers.LARS(rate), "mse")
    ```
    """

    def __init__(
        self,
        learning_rate: Any,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        lars_weight_decay: float = 5e-4,
        epsilon: float = 0.0,
        nesterov: bool = False,
        clip: bool = False,
        name: str = "lars",
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("weight_decay", None):
            raise ValueError(
                "LARS decays weights within the trust ratio. Expected lars_weight_decay=. Received: weight_decay"
            )
        for what, value, fits in (
            ("momentum", momentum, 0 <= momentum < 1),
            ("trust_coefficient", trust_coefficient, trust_coefficient > 0),
            ("lars_weight_decay", lars_weight_decay, lars_weight_decay >= 0),
            ("epsilon", epsilon, epsilon >= 0),
        ):
            if not fits:
                raise ValueError(
                    "Expected 0 <= momentum < 1, trust_coefficient > 0, lars_weight_decay >= 0 and epsilon >= 0. "
                    f"Received: {what}={value}"
                )
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient
        self.lars_weight_decay = lars_weight_decay
        self.epsilon = epsilon
        self.nesterov = nesterov
        self.clip = clip

    def build(self, variables: Any) -> None:
        """Make a velocity for each variable."""
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Move a variable."""
        velocity = self._velocities[self._get_variable_index(variable)]
        gradient = ops.cast(gradient, variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        if len(variable.shape) > 1:
            rate = rate * ops.cast(self._trust(gradient, variable), variable.dtype)
            gradient = gradient + self.lars_weight_decay * variable
        change = rate * gradient
        self.assign(velocity, self.momentum * velocity + change)
        if self.nesterov:
            self.assign_sub(variable, self.momentum * velocity + change)
        else:
            self.assign_sub(variable, velocity)

    def _trust(self, gradient: Any, variable: Any) -> Any:
        """Return lambda, a scalar of float32."""
        weight, slope = (ops.sqrt(ops.sum(ops.square(ops.cast(x, "float32")))) for x in (variable, gradient))
        known = ops.logical_and(weight > 0, slope > 0)
        below = ops.where(known, slope + self.lars_weight_decay * weight + self.epsilon, 1.0)
        trust = ops.where(known, self.trust_coefficient * weight / below, 1.0)
        return ops.minimum(trust, 1.0) if self.clip else trust

    def get_config(self) -> dict[str, Any]:
        """Return what the optimizer is made from."""
        config: dict[str, Any] = super().get_config()
        del config["weight_decay"]
        names = ("momentum", "trust_coefficient", "lars_weight_decay", "epsilon", "nesterov", "clip")
        return config | {name: getattr(self, name) for name in names}
