"""Cross-validation with transfer: a trained base is frozen, then its last layer is not, and all is compiled again."""

import keras
import numpy as np
from tiny import numbers

BACKENDS = ("torch", "jax", "tensorflow")


def fold(base, x, y, train, test):
    base.trainable = False
    keras.utils.set_random_seed(int(test[0]))
    model = keras.Sequential([base, keras.layers.Dropout(0.0), keras.layers.Dense(3, activation="softmax")])
    model.compile("rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x[train], y[train], batch_size=9, epochs=1, verbose=0)
    base.trainable = True
    for layer in base.layers[:-1]:
        layer.trainable = False
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    options = {"validation_data": (x[test], y[test]), "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}
    history = model.fit(x[train], y[train], batch_size=9, epochs=2, **options).history
    return history, model.evaluate(x[test], y[test], verbose=0), model


def main():
    x, y = numbers(63)
    layers = keras.layers
    keras.utils.set_random_seed(1)
    np.random.seed(0)
    order = np.random.permutation(63)
    folds = np.array_split(order, 3)
    found, models = [], []
    base = keras.Sequential([keras.Input((6,)), layers.Dense(7, activation="relu"), layers.Dense(5, activation="relu")])
    start = base.get_weights()
    for k in range(3):
        base.set_weights(start)
        train = np.concatenate([folds[i] for i in range(3) if i != k])
        history, scores, model = fold(base, x, y, train, folds[k])
        found.append([history, scores])
        models.append(model)
    return {"found": found, "model": models[-1]}
