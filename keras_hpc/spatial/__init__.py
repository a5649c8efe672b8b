# SPDX-License-Identifier: Apache-2.0
"""Models of which the ranks of a group compute every sample together, each its part."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from keras_hpc.spatial.layers import pointwise
    from keras_hpc.spatial.partition import partition

__all__ = ["partition", "pointwise"]

if not _typing.TYPE_CHECKING:

    def __getattr__(name: str):
        """Import these when they are asked for: they need Keras, and the arithmetic does not."""
        modules = {"pointwise": "keras_hpc.spatial.layers", "partition": "keras_hpc.spatial.partition"}
        if name in modules:
            return getattr(_importlib.import_module(modules[name]), name)
        raise AttributeError(f"module 'keras_hpc.spatial' has no attribute {name!r}")
