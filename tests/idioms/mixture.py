"""A mixture density network: the log of a sum of exponentials as a loss of one's own class, inputs normalized."""

import keras
import numpy as np
from keras import ops

BACKENDS = ("torch", "jax", "tensorflow")


class NegativeLogLikelihood(keras.losses.Loss):
    def __init__(self, parts):
        super().__init__(name="nll")
        self.parts = parts

    def call(self, y_true, y_pred):
        means, scales, shares = ops.split(y_pred, 3, axis=-1)
        scales = ops.softplus(scales) + 1e-3
        each = -0.5 * ops.square((y_true - means) / scales) - ops.log(scales)
        return ops.mean(-ops.logsumexp(ops.log_softmax(shares) + each, axis=-1))


def main():
    keras.utils.set_random_seed(7)
    x = np.random.uniform(-1, 1, (58, 1)).astype("float32")
    y = (x + 0.3 * np.sin(6 * x) + np.random.normal(0, 0.1, x.shape)).astype("float32")
    np.random.shuffle(x)
    normalize = keras.layers.Normalization()
    normalize.adapt(x)
    model = keras.Sequential(
        [keras.Input((1,)), normalize, keras.layers.Dense(9, activation="elu"), keras.layers.Dense(9)]
    )
    model.compile(keras.optimizers.AdamW(0.01, global_clipnorm=1.0), NegativeLogLikelihood(3))
    history = model.fit(x, y, batch_size=14, epochs=3, validation_split=0.2).history
    return {"history": history, "model": model}
