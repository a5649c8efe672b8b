# SPDX-License-Identifier: Apache-2.0
"""Files of tensors, in the safetensors format, with digests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import xxhash

from keras_hpc.job.plan import dtype_of

_CHUNK_BYTES = 1 << 20
# The format's names of what Keras' variables hold. (Those of float8 are scaled float32 until a layer computes.)
_DTYPES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip


def holds(dtype: str) -> bool:
    """Return whether a file can hold arrays of a dtype."""
    return dtype in _DTYPES.values()


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Write a file, flush it to the disk, and return the digest of its bytes.

    Args:
        path: what is there is replaced.
        arrays: contiguous, of dtypes of which `holds` is true.

    Raises:
        OSError: the disk is full, and so on.
    """
    try:
        safetensors.numpy.save_file(dict(arrays), path)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read(path: Path, digest: str) -> dict[str, np.ndarray]:
    """Return what `write` wrote.

    Raises:
        ValueError: it is not what was written, or no such file.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    if xxhash.xxh3_128_hexdigest(content) != digest:
        raise ValueError(f"{path.name} is not as it was written")
    try:
        found = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return {
        name: np.frombuffer(tensor["data"], dtype_of(_DTYPES[tensor["dtype"]])).reshape(tensor["shape"])
        for name, tensor in found
    }
