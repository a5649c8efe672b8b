"""Translates: an encoder and a decoder with layers of one's own that hand masks on, a pair of inputs by name."""

import keras
import numpy as np
from keras import layers, ops

BACKENDS = ("torch", "jax")
WORDS, LENGTH = 11, 6


class Positions(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words = layers.Embedding(WORDS, 8)
        self.places = layers.Embedding(LENGTH, 8)
        self.supports_masking = True

    def call(self, tokens):
        return self.words(tokens) + self.places(ops.arange(0, ops.shape(tokens)[-1], 1))

    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 0)


class Reading(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4)
        self.dense, self.norm = layers.Dense(8, activation="relu"), layers.LayerNormalization()
        self.supports_masking = True

    def call(self, x, mask=None):
        padding = None if mask is None else ops.cast(mask[:, None, :], "int32")
        x = self.norm(x + self.attention(query=x, value=x, key=x, attention_mask=padding))
        return x + self.dense(x)


class Writing(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.own, self.other = layers.MultiHeadAttention(2, 4), layers.MultiHeadAttention(2, 4)
        self.norm = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, inputs, mask=None):
        x, encoded = inputs
        x = self.norm(x + self.own(query=x, value=x, key=x, use_causal_mask=True))
        padding = None if mask is None or mask[1] is None else ops.cast(mask[1][:, None, :], "int32")
        return x + self.other(query=x, value=encoded, key=encoded, attention_mask=padding)


def main():
    keras.utils.set_random_seed(12)
    random = np.random.default_rng(3)
    source = random.integers(1, WORDS, size=(57, LENGTH))
    source[np.arange(LENGTH) >= random.integers(2, LENGTH + 1, size=(57, 1))] = 0
    target = np.where(source == 0, 0, (source * 3) % (WORDS - 1) + 1)
    given = np.concatenate([np.ones((57, 1), int), target[:, :-1]], axis=1)
    encoder_in, decoder_in = keras.Input((None,), name="encoder"), keras.Input((None,), name="decoder")
    encoded = Reading()(Positions()(encoder_in))
    decoded = Writing()([Positions()(decoder_in), encoded])
    model = keras.Model({"encoder": encoder_in, "decoder": decoder_in}, layers.Dense(WORDS, "softmax")(decoded))
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    model.compile(keras.optimizers.RMSprop(0.01), loss, metrics=["accuracy"])
    x = {"encoder": source, "decoder": given}
    history = model.fit(x, target, batch_size=8, epochs=2, validation_split=0.2).history
    sentence = np.ones((1, 1), int)
    for _ in range(LENGTH - 1):  # greedily, word by word
        odds = model.predict({"encoder": source[:1], "decoder": sentence}, verbose=0)
        sentence = np.append(sentence, np.argmax(odds[:, -1:], axis=-1), axis=1)
    return {"history": history, "model": model, "sentence": sentence}
