"""A loop of one's own: `jax.jit` of a step with `stateless_apply`, the gradients counted inside of it."""

import jax
import keras
import numpy as np
from tiny import classifier, numbers

import keras_hpc

BACKENDS = ("jax",)


def main():
    model, optimizer = classifier(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @jax.jit
    def train_step(state, x, y):
        trainable, fixed, slots = state

        def forward(weights):
            outputs, updated = model.stateless_call(weights, fixed, x, training=True)
            return loss_of(y, outputs), updated

        with keras_hpc.step(samples=len(x)):
            (loss, fixed), gradients = jax.value_and_grad(forward, has_aux=True)(trainable)
            trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return loss, (trainable, fixed, slots)

    variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state = [[v.value for v in part] for part in variables]
    n, losses = keras_hpc.size(), []
    batches = [tuple(a[i : i + 16 // n] for a in numbers()) for i in range(0, 64, 16 // n)]
    for _ in range(2):
        for x, y in keras_hpc.shard(iter(batches)):
            loss, state = train_step(state, x, y)
            losses.append(float(np.asarray(keras_hpc.allreduce(loss))))
    for part, values in zip(variables, state, strict=True):
        for variable, value in zip(part, values, strict=True):
            variable.assign(value)
    return {"losses": losses, "model": model}
