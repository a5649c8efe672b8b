# SPDX-License-Identifier: Apache-2.0
"""What `keras_hpc.init()` changes in Keras, and nothing else. `finalize()` takes every change out again."""

from keras_hpc.keras_hooks.install import install, uninstall

__all__ = ["install", "uninstall"]
