"""A masked language model as keras.io writes it: a loss for each word, weights in the step, trackers of its own."""

import keras
import numpy as np
import tensorflow as tf

BACKENDS = ("tensorflow",)
loss_of_words = keras.losses.SparseCategoricalCrossentropy(reduction=None)
tracker = keras.metrics.Mean(name="loss")


class Masked(keras.Model):
    def train_step(self, inputs):
        words, labels, weights = inputs
        with tf.GradientTape() as tape:
            loss = loss_of_words(labels, self(words, training=True), sample_weight=weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        tracker.update_state(loss, sample_weight=weights)
        return {"loss": tracker.result()}

    @property
    def metrics(self):
        return [tracker]


def main():
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(5)
    labels = random.integers(2, 12, size=(45, 6))
    hidden = random.uniform(size=labels.shape) < 0.3
    words, weights = np.where(hidden, 1, labels), hidden.astype("float32")
    data = tf.data.Dataset.from_tensor_slices((words, labels, weights)).shuffle(100, seed=2).batch(8)
    inputs = keras.Input((6,), dtype="int64")
    x = keras.layers.Embedding(12, 8)(inputs)
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 4)(x, x))
    model = Masked(inputs, keras.layers.Dense(12, activation="softmax")(x))
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    return {"history": model.fit(data, epochs=2).history, "model": model}
