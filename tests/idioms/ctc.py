"""Reading captchas: a recurrent network over columns of images, a last layer that adds the CTC loss itself."""

import keras
import numpy as np
from keras import ops
from tiny import images

BACKENDS = ("torch", "tensorflow", "jax")


class CTCLayer(keras.layers.Layer):
    def call(self, y_true, y_pred):
        rows = ops.shape(y_true)[0]
        frames = ops.full((rows,), y_pred.shape[1], dtype="int32")
        signs = ops.full((rows,), y_true.shape[1], dtype="int32")
        self.add_loss(ops.mean(ops.ctc_loss(y_true, y_pred, signs, frames, mask_index=4)))
        return y_pred


def main():
    keras.utils.set_random_seed(4)
    x, random = images(44), np.random.default_rng(2)
    labels = random.integers(0, 4, (44, 3)).astype("int32")
    layers = keras.layers
    image, label = keras.Input((8, 8, 1), name="image"), keras.Input((3,), name="label", dtype="int32")
    columns = layers.Reshape((8, 16))(layers.Conv2D(2, 3, padding="same", activation="relu")(image))
    signs = layers.Dense(5)(layers.Bidirectional(layers.LSTM(4, return_sequences=True))(columns))
    model = keras.Model([image, label], CTCLayer()(label, signs))
    model.compile(keras.optimizers.Adam(0.01))
    data, held_out = {"image": x, "label": labels}, {"image": x[:15], "label": labels[:15]}
    history = model.fit(data, batch_size=12, epochs=2, validation_data=(held_out,)).history
    reader = keras.Model(image, signs)
    return {"history": history, "model": model, "read": reader.predict(x[:5])}
