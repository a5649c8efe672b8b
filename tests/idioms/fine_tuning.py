"""A base is frozen, then trained as well with a lower rate; BatchNormalization stays as it was; spectral norms."""

import keras
from tiny import images, numbers

BACKENDS = ("torch", "jax", "tensorflow")


def main():
    keras.utils.set_random_seed(6)
    layers = keras.layers
    x, (_, y) = images(48), numbers(48)
    base = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()])
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    pooled = layers.GlobalAveragePooling2D()(base(layers.Rescaling(2.0)(inputs), training=False))
    model = keras.Model(inputs, layers.SpectralNormalization(layers.Dense(3))(pooled))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    first = model.fit(x, y, batch_size=16, epochs=2).history
    base.trainable = True
    base.layers[1].trainable = False
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    second = model.fit(x, y, batch_size=16, epochs=2, initial_epoch=1).history
    return {"first": first, "second": second, "model": model}
