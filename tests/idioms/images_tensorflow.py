"""Images from a folder with their default seed, `None`: shuffled, augmented by layers in `map`, cached."""

from pathlib import Path

import keras
import tensorflow as tf
from tiny import images

BACKENDS = ("tensorflow",)
NEEDS = ("PIL",)


def main():
    for index, image in enumerate(images(40)):
        folder = Path("images") / ("cat", "dog")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.png").write_bytes(tf.io.encode_png(tf.cast(image * 255, "uint8")).numpy())
    dataset = keras.utils.image_dataset_from_directory(
        "images", image_size=(8, 8), batch_size=8, color_mode="grayscale"
    )
    flip = keras.layers.RandomFlip("horizontal")
    dataset = dataset.cache().map(lambda x, y: (flip(x, training=True), y)).prefetch(2)
    layers = keras.layers
    model = keras.Sequential([layers.Rescaling(1 / 255), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(1)])
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True), optimizer="adam", metrics=["accuracy"])
    history = model.fit(dataset, epochs=2).history
    return {"_history": history, "_model": model}
