"""A policy for all layers; on TensorFlow and PyTorch with float16, which scales the loss."""

import keras
from tiny import compiled, numbers

BACKENDS = ("tensorflow", "jax")
TOLERANCE = 0.02  # numbers of 8 or 11 bits


def main():
    keras.mixed_precision.set_global_policy("mixed_bfloat16" if keras.backend.backend() == "jax" else "mixed_float16")
    x, y = numbers()
    model = compiled()
    return {"history": model.fit(x, y, batch_size=16, epochs=2).history, "model": model}
