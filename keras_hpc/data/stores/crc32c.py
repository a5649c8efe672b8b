# SPDX-License-Identifier: Apache-2.0
"""CRC-32C, as TFRecord files have it: by google_crc32c, which zarr brings along, or by Python for a few bytes."""

from __future__ import annotations

try:
    import google_crc32c
except ImportError:
    google_crc32c = None

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, its bits reversed
_MASK_DELTA = 0xA282EAD8
_ALL = 0xFFFFFFFF


def is_fast() -> bool:
    """Return whether more than a few bytes can be checked: gigabytes a second, or else a megabyte."""
    return google_crc32c is not None and google_crc32c.implementation == "c"


def masked(data: bytes) -> int:
    """Return the checksum of some bytes as TFRecord files store it."""
    crc = google_crc32c.value(data) if is_fast() else _by_table(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL


def _by_table(data: bytes) -> int:
    crc = _ALL
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ _ALL


def _entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = [_entry(byte) for byte in range(256)]
