# SPDX-License-Identifier: Apache-2.0
"""Formats: how many samples a file has, and how a range of them is read. One module for each format.

The libraries of the formats (h5py, zarr) are no dependencies of keras_hpc: who has such files has them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence

from keras_hpc.data.stores.base import Concatenated, Store
from keras_hpc.data.stores.hdf5 import HDF5Store
from keras_hpc.data.stores.numpy import NpyStore, NpzStore
from keras_hpc.data.stores.tar import TarStore
from keras_hpc.data.stores.tfrecord import TFRecordStore
from keras_hpc.data.stores.zarr import ZarrStore

__all__ = ["Concatenated", "Store", "open_store"]

_FORMATS: dict[str, Callable[[str, Sequence[str] | None], Store]] = {
    ".h5": HDF5Store,
    ".hdf5": HDF5Store,
    ".npy": NpyStore,
    ".npz": NpzStore,
    ".tar": TarStore,
    ".tfrecord": TFRecordStore,
    ".tfrecords": TFRecordStore,
    ".zarr": ZarrStore,
}


def open_store(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], fields: Sequence[str] | None = None
) -> Store:
    """Open files of samples as one store: one after the other, those of a pattern by name.

    | files | a sample |
    |---|---|
    | `.h5`, `.hdf5` | a row of each data set in `fields` |
    | `.zarr` | a row of each array in `fields`, or of the only one |
    | `.npz` | a row of each array in `fields`; those that are compressed are kept in memory |
    | `.npy` | a row |
    | `.tar` (WebDataset) | the files with a common name up to the first dot: `{"jpg": bytes, "cls": bytes}` |
    | `.tfrecord`, `.tfrecords` | a record: bytes |

    To find the samples of `.tar` and `.tfrecord` files, all of them are gone through once.

    Args:
        paths: of a file, a pattern such as "train-*.h5" or "train/**/*.h5", or a list of both.
        fields: names of data sets or arrays, in the order in which they are wanted; None: all, by name. For tar files:
            extensions that each sample must have.

    Returns:
        A store with `len()` and `read(start, stop)`.

    Raises:
        FileNotFoundError: no file fits; names it.
        ValueError: files that cannot be read, or differ in what a sample is.
    """
    if isinstance(fields, str):
        raise ValueError(f"`fields` are names. Expected a list or a tuple of them. Received: fields={fields!r}")
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found = [file for path in given for file in _matching(os.fspath(path))]
    if not found:
        raise ValueError("There are no files to read. Expected at least one path. Received: []")
    stores = [_open(path, fields) for path in found]
    return stores[0] if len(stores) == 1 else Concatenated(stores)


def _matching(path: str) -> list[str]:
    if os.path.exists(path):
        return [path]
    if not (files := sorted(glob.glob(path, recursive=True))):
        raise FileNotFoundError(f"No such file. Expected a file or a pattern that fits some. Received: {path!r}")
    return files


def _open(path: str, fields: Sequence[str] | None) -> Store:
    ending = os.path.splitext(path.rstrip("/"))[1].lower()
    if ending not in _FORMATS:
        raise ValueError(
            f"The name of a file says what its format is. Expected one that ends in {', '.join(_FORMATS)}. "
            f"Received: {path!r}"
        )
    return _FORMATS[ending](path, fields)
