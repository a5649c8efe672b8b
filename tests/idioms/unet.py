"""Segments images: a U-net with skip connections, a weight for each pixel, and a mean of intersections over unions."""

import keras
import numpy as np
from tiny import images

BACKENDS = ("jax", "tensorflow")  # Keras cannot differentiate it on PyTorch
layers = keras.layers


class Pictures(keras.utils.PyDataset):
    """Reads a picture at a time, as from files."""

    def __init__(self, x, y, batch, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.batch = x, y, batch

    def __len__(self):
        return -(-len(self.x) // self.batch)

    def __getitem__(self, index):
        chosen = range(index * self.batch, min((index + 1) * self.batch, len(self.x)))
        x, y = np.zeros((len(chosen), 8, 8, 1), "float32"), np.zeros((len(chosen), 8, 8, 1), "uint8")
        for row, number in enumerate(chosen):
            x[row], y[row] = self.x[number], self.y[number]
        return x, y, np.where(y == 0, 0.5, 2.0).astype("float32")[..., 0]


def network():
    inputs = keras.Input((8, 8, 1))
    first = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    down = layers.Conv2D(8, 3, padding="same", activation="relu")(layers.MaxPooling2D()(first))
    up = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(down)
    joined = layers.Concatenate()([first, layers.LayerNormalization()(up)])
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same", activation="softmax")(joined))


def main():
    keras.utils.set_random_seed(4)
    x = images(45)
    y = (x * 3).astype("uint8")
    model = network()
    scores = [keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou"), "accuracy"]
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", weighted_metrics=scores)
    train, valid = Pictures(x[:33], y[:33], 8), Pictures(x[33:], y[33:], 5, workers=2)
    checkpoint = keras.callbacks.ModelCheckpoint("unet.keras", monitor="val_loss", save_best_only=True)
    history = model.fit(train, epochs=2, validation_data=valid, callbacks=[checkpoint]).history
    best = keras.saving.load_model("unet.keras")
    masks = np.argmax(best.predict(valid), axis=-1)
    return {"history": history, "model": model, "best": best.evaluate(valid), "masks": masks.mean()}
