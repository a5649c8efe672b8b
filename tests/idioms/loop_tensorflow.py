"""A loop of one's own, eager and then as a `tf.function`, with a metric that is averaged by hand."""

import keras
import tensorflow as tf
from tiny import classifier, numbers

import keras_hpc

BACKENDS = ("tensorflow",)


def train(traced):
    model, optimizer = classifier(), keras.optimizers.Adam(0.01)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights, strict=True)
        )
        return loss

    step = tf.function(train_step) if traced else train_step
    dataset = tf.data.Dataset.from_tensor_slices(numbers()).shuffle(64).batch(16 // keras_hpc.size())
    losses = []
    for _ in range(2):
        for x, y in keras_hpc.shard(dataset):
            with keras_hpc.step(samples=len(x)):
                losses.append(keras_hpc.allreduce(float(step(x, y))))
    return losses, model


def main():
    keras.utils.set_random_seed(5)
    eager, first = train(False)
    traced, second = train(True)
    return {"eager": eager[-1] < eager[0], "traced": traced[-1] < traced[0], "_models": [first, second]}
