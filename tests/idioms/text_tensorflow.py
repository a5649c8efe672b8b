"""Texts from a folder without a seed, their vocabulary, StringLookup, and a model that takes strings."""

from pathlib import Path

import keras
import tensorflow as tf
from keras import layers

BACKENDS = ("tensorflow",)


def write_texts():
    for index in range(48):
        folder = Path("texts") / ("good", "bad")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.txt").write_text(f"{'fine nice' if index % 2 == 0 else 'dull grey'} word{index % 5}")


def main():
    keras.utils.set_random_seed(11)
    write_texts()  # on each rank, the same
    options = {"batch_size": 8, "validation_split": 0.25, "seed": 3}
    train, valid = keras.utils.text_dataset_from_directory("texts", subset="both", **options)
    whole = keras.utils.text_dataset_from_directory("texts", batch_size=8)
    vectorize = layers.TextVectorization(max_tokens=20, output_sequence_length=4)
    vectorize.adapt(train.map(lambda text, label: text))
    inputs = keras.Input((4,), dtype="int64")
    pooled = layers.GlobalMaxPooling1D()(layers.Embedding(20, 4)(inputs))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(pooled))
    model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
    train, valid = (part.map(lambda text, label: (vectorize(text), label)).prefetch(2) for part in (train, valid))
    history = model.fit(train, validation_data=valid, epochs=2).history
    tested = model.evaluate(whole.map(lambda text, label: (vectorize(text), label)))
    lookup = layers.StringLookup(vocabulary=["good", "bad"])
    strings = keras.Input((1,), dtype="string")
    end_to_end = keras.Model(strings, model(vectorize(strings)))
    predicted = end_to_end.predict(tf.constant([["fine nice word1"], ["dull grey"]]))
    return {
        "history": history,
        "tested": tested,
        "words": sorted(vectorize.get_vocabulary()) == sorted(set(vectorize.get_vocabulary())),
        "numbers": lookup(tf.constant(["bad", "ugly"])),
        "predicted": predicted,
        "model": model,
    }
