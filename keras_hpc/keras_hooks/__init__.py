# SPDX-License-Identifier: Apache-2.0
"""What `keras_hpc.init()` changes in Keras, and nothing else. `finalize()` takes every change out again."""

from keras_hpc.keras_hooks.install import begin, install, uninstall
from keras_hpc.keras_hooks.keras_private import check
from keras_hpc.keras_hooks.state.settling import say_what_is_left

__all__ = ["begin", "check", "install", "say_what_is_left", "uninstall"]
