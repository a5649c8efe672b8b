"""Windows of a series, cut by a function of Keras, for training and for validation; a threshold to stop at."""

import keras
import numpy as np

BACKENDS = ("tensorflow", "torch", "jax")


def main():
    keras.utils.set_random_seed(5)
    series = np.sin(np.arange(160) / 5).astype("float32")[:, None] + np.arange(3, dtype="float32")
    mean, deviation = series[:100].mean(axis=0), series[:100].std(axis=0)
    series = (series - mean) / deviation
    cut = keras.utils.timeseries_dataset_from_array
    options = {"sequence_length": 8, "sampling_rate": 2, "batch_size": 16}
    train = cut(series[:100], series[15:115, 0], **options)
    valid = cut(series[100:140], series[115:155, 0], **options)
    inputs = keras.Input((8, 3))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.LSTM(4)(inputs)))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    stop = keras.callbacks.EarlyStopping("val_loss", min_delta=0, patience=1)
    history = model.fit(train, epochs=3, validation_data=valid, callbacks=[stop]).history
    for x, _ in valid.take(1):
        guess = model.predict(x, verbose=0)
    return {"history": history, "model": model, "guess": guess, "batches": len(valid)}
