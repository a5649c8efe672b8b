"""Python of ranks that have what a user's job needs, and nothing else: for them the rest is not installed.

Keras, TensorFlow and PyTorch import scikit-learn, matplotlib and each other wherever they can: up to half of
the time in which a rank starts. TESTS_TENSORFLOW=1: ranks of another backend have TensorFlow, too.
TESTS_EXAMPLES=1: they have what the examples draw with and learn from.
"""

import os
import sys

backend = os.environ.get("KERAS_BACKEND")
hidden = [] if os.environ.get("TESTS_EXAMPLES") else ["sklearn", "matplotlib"]
if backend in ("tensorflow", "torch"):
    hidden.append("jax")
if backend in ("jax", "torch") and not os.environ.get("TESTS_TENSORFLOW"):
    hidden.append("tensorflow")
for name in hidden:
    sys.modules[name] = None  # where Python looks first, whoever asks
