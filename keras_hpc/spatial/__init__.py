# SPDX-License-Identifier: Apache-2.0
"""Models of which the ranks of a group compute every sample together, each its part."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from keras_hpc.spatial.layers import pointwise, whole

__all__ = ["pointwise", "whole"]

if not _typing.TYPE_CHECKING:

    def __getattr__(name: str):
        """Import it when it is asked for: it needs Keras, and the arithmetic does not."""
        if name in __all__:
            return getattr(_importlib.import_module("keras_hpc.spatial.layers"), name)
        raise AttributeError(f"module 'keras_hpc.spatial' has no attribute {name!r}")
