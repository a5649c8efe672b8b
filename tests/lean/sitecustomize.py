"""Python of ranks that have what a user's job needs, and nothing else: for them the rest is not installed.

Keras, TensorFlow and PyTorch import scikit-learn, matplotlib and each other wherever they can: up to half of
the time in which a rank starts. TESTS_TENSORFLOW=1: ranks of another backend have TensorFlow, too.
TESTS_EXAMPLES=1: they have what the examples draw with and learn from.
"""

import os
import sys


def hidden(environment):
    """What is not there, of all that is installed."""
    backend = environment.get("KERAS_BACKEND")
    names = [] if environment.get("TESTS_EXAMPLES") else ["sklearn", "matplotlib"]
    if backend in ("tensorflow", "torch"):
        names.append("jax")
    if backend in ("jax", "torch") and not environment.get("TESTS_TENSORFLOW"):
        names.append("tensorflow")
    return names


for name in hidden(os.environ):
    sys.modules[name] = None  # where Python looks first, whoever asks
