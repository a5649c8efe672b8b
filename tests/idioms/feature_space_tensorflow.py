"""A table of named columns: FeatureSpace adapts itself and maps a data set of dictionaries."""

import keras
import numpy as np
import tensorflow as tf

BACKENDS = ("tensorflow",)


def main():
    keras.utils.set_random_seed(12)
    random = np.random.default_rng(5)
    table = {
        "age": random.uniform(20, 70, 64).astype("float32"),
        "kind": random.choice(["a", "b", "c"], 64),
        "rooms": random.integers(1, 4, 64),
    }
    y = (table["age"] > 45).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((table, y))
    space = keras.utils.FeatureSpace(
        features={"age": "float_normalized", "kind": "string_categorical", "rooms": "integer_categorical"},
        output_mode="concat",
    )
    space.adapt(dataset.map(lambda x, _: x))
    ready = dataset.batch(16).map(lambda x, y: (space(x), y)).prefetch(2)
    model = keras.Model(space.get_encoded_features(), keras.layers.Dense(1)(space.get_encoded_features()))
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return {"history": model.fit(ready, epochs=2, validation_data=ready).history, "model": model}
