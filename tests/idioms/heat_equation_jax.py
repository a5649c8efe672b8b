"""A physicist's network: the heat equation as a loss, with second derivatives, in a step of its own."""

import jax
import keras
import numpy as np
from keras import ops

BACKENDS = ("jax",)


class Heat(keras.Model):
    def __init__(self):
        inputs = keras.Input((2,))
        hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Dense(8, activation="tanh")(inputs))
        super().__init__(inputs, keras.layers.Dense(1)(hidden))
        self.residual, self.data = keras.metrics.Mean("residual"), keras.metrics.Mean("data")

    @property
    def metrics(self):
        return [self.residual, self.data]

    def train_step(self, state, data):
        trainable, fixed, optimizer, metrics = state
        points, values = data

        def u(weights, point):
            return self.stateless_call(weights, fixed, point[None])[0][0, 0]

        def losses(weights):
            first = jax.vmap(jax.grad(u, argnums=1), (None, 0))(weights, points)
            second = jax.vmap(jax.hessian(u, argnums=1), (None, 0))(weights, points)
            residual = ops.mean(ops.square(first[:, 1] - 0.1 * second[:, 0, 0]))
            at_data = ops.mean(ops.square(jax.vmap(u, (None, 0))(weights, points) - values[:, 0]))
            return residual + 5 * at_data, (residual, at_data)

        gradients, (residual, at_data) = jax.grad(losses, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        r = self.residual.stateless_update_state(metrics[:2], residual)
        d = self.data.stateless_update_state(metrics[2:], at_data)
        logs = {"residual": self.residual.stateless_result(r), "data": self.data.stateless_result(d)}
        return logs, (trainable, fixed, optimizer, r + d)


def main():
    keras.utils.set_random_seed(6)
    points = np.random.default_rng(0).uniform(size=(50, 2)).astype("float32")
    values = np.sin(np.pi * points[:, :1]) * np.exp(-points[:, 1:])
    model = Heat()
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.9)))
    history = model.fit(points, values, batch_size=16, epochs=3).history
    return {"history": history, "model": model}
