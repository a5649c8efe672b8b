"""Python of ranks that have what a user's job needs, and nothing else: for them the rest is not installed.

Keras, TensorFlow and PyTorch import scikit-learn, matplotlib and JAX wherever they can, and that is up to half of the
time in which a rank starts.
"""

import os
import sys

HIDDEN = ["sklearn", "matplotlib"] + (["jax"] if os.environ.get("KERAS_BACKEND") in ("tensorflow", "torch") else [])
for name in HIDDEN:
    sys.modules[name] = None  # where Python looks first, whoever asks
