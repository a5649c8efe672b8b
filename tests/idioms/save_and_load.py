"""Each rank saves to the same paths and loads at once; the loaded model goes on training."""

import keras
import numpy as np
from tiny import compiled, numbers

BACKENDS = ("torch", "tensorflow")


def main():
    x, y = numbers()
    model = compiled()
    model.fit(x, y, batch_size=16)
    model.save("model.keras")
    loaded = keras.saving.load_model("model.keras")
    model.save_weights("model.weights.h5")
    fresh = compiled(seed=5)
    fresh.load_weights("model.weights.h5")
    same = np.allclose(fresh.predict(x), loaded.predict(x), atol=1e-5)
    history = loaded.fit(x, y, batch_size=16).history
    return {"same": same, "history": history, "models": [model, loaded, fresh]}
