# SPDX-License-Identifier: Apache-2.0
"""Python values as bytes and back: JSON, and behind it the memory of arrays. What comes from other ranks only is data.

JSON knows neither tuples nor bytes nor keys that are no text. They, and arrays, become a dictionary with the only key
"", which holds a list: what it is, and what it is made of.
"""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np

_LENGTH_BYTES = 8
_KINDS = "biufcSUmM"  # of NumPy's dtypes that are nothing but memory


def encode(value: Any) -> bytes:
    """Return a value as bytes.

    Args:
        value: None, bool, int, float, complex, str, bytes, NumPy arrays and numbers, and lists, tuples and dictionaries
            of such values.

    Raises:
        TypeError: it holds something else.
    """
    blobs: list[bytes] = []
    text = json.dumps(_pack(value, "value", blobs)).encode()
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *blobs])


def decode(data: bytes) -> Any:
    """Return the value that `encode` made `data` of; arrays are writeable."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    return _Reader(memoryview(data)[end:]).unpack(json.loads(data[_LENGTH_BYTES:end]))


def _pack(value: Any, place: str, blobs: list[bytes]) -> Any:
    """Return what JSON can hold; appends to `blobs` what it cannot."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        blobs.append(array.tobytes())
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {"": [kind, _name_of(array.dtype, place), list(array.shape), len(blobs[-1])]}
    if isinstance(value, list):
        return [_pack(item, f"{place}[{i}]", blobs) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"": ["tuple", [_pack(item, f"{place}[{i}]", blobs) for i, item in enumerate(value)]]}
    if isinstance(value, dict):
        keys = [_pack(key, f"a key of {place}", blobs) for key in value]
        items = [_pack(item, f"{place}[{key!r}]", blobs) for key, item in value.items()]
        if all(type(key) is str and key for key in keys):
            return dict(zip(keys, items, strict=True))
        return {"": ["dict", keys, items]}
    if isinstance(value, (bytes, bytearray)):
        blobs.append(bytes(value))
        return {"": ["bytes", len(value)]}
    if type(value) is complex:
        return {"": ["complex", value.real, value.imag]}
    raise TypeError(
        "Expected None, numbers, text, bytes, NumPy arrays, and lists, tuples and dictionaries of them. Received: "
        f"{place} of type {type(value).__name__}"
    )


def _name_of(dtype: np.dtype[Any], place: str) -> str:
    if dtype.type.__module__.startswith("ml_dtypes"):  # whose names NumPy does not know
        return dtype.name
    if dtype.kind in _KINDS and dtype.names is None:
        return dtype.str
    raise TypeError(f"Expected arrays of numbers, text, bytes or times. Received: {place} of dtype {dtype}")


def _dtype_of(name: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(name if name[0] in "<>|=" else getattr(ml_dtypes, name))
    return dtype


class _Reader:
    """Reads what `_pack` wrote, in the same order."""

    def __init__(self, blobs: memoryview) -> None:
        self._blobs = blobs

    def unpack(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "" not in value:
            return {key: self.unpack(item) for key, item in value.items()}
        kind, *parts = value[""]
        if kind == "tuple":
            return tuple(self.unpack(parts[0]))
        if kind == "dict":
            keys = self.unpack(parts[0])
            return dict(zip(keys, self.unpack(parts[1]), strict=True))
        if kind == "bytes":
            return self._take(parts[0])
        if kind == "complex":
            return complex(*parts)
        name, shape, nbytes = parts
        array = np.frombuffer(bytearray(self._take(nbytes)), _dtype_of(name)).reshape(shape)
        return array if kind == "array" else array[()]

    def _take(self, nbytes: int) -> bytes:
        taken, self._blobs = bytes(self._blobs[:nbytes]), self._blobs[nbytes:]
        return taken
