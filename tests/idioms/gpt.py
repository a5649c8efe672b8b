"""A small GPT: causal attention over an embedding of positions, a callback that writes text after each epoch."""

import keras
import numpy as np
from keras import ops

BACKENDS = ("torch", "jax", "tensorflow")


class Positions(keras.layers.Layer):
    def __init__(self, length, words, width):
        super().__init__()
        self.words, self.places = keras.layers.Embedding(words, width), keras.layers.Embedding(length, width)

    def call(self, x):
        return self.words(x) + self.places(ops.arange(ops.shape(x)[-1]))


class Writer(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.texts = []

    def on_epoch_end(self, epoch, logs=None):
        text = [1, 2]
        while len(text) < 8:
            padded = np.array([[*text, *[0] * (8 - len(text))]])
            odds = np.asarray(self.model.predict(padded, verbose=0))[0, len(text) - 1].astype("float64")
            odds = np.exp(odds) / np.exp(odds).sum()
            text.append(int(np.random.choice(10, p=odds)))
        self.texts.append(text)


def main():
    keras.utils.set_random_seed(9)
    text = np.random.randint(0, 10, 400)
    x = np.stack([text[i : i + 8] for i in range(0, 390, 8)][:46])
    y = np.stack([text[i + 1 : i + 9] for i in range(0, 390, 8)][:46])
    layers = keras.layers
    inputs = keras.Input((8,), dtype="int32")
    hidden = Positions(8, 10, 6)(inputs)
    attended = layers.MultiHeadAttention(2, 3)(hidden, hidden, use_causal_mask=True)
    hidden = layers.LayerNormalization(epsilon=1e-6)(hidden + attended)
    model = keras.Model(inputs, layers.Dense(10)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Adam would make steps of what is rounding: biases of keys have no gradients.
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss)
    writer = Writer()
    history = model.fit(x, y, batch_size=10, epochs=2, callbacks=[writer]).history
    return {"history": history, "texts": writer.texts, "model": model}
