# SPDX-License-Identifier: Apache-2.0
"""What arguments of the command line mean."""

from __future__ import annotations

import argparse

_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def sizes(text: str) -> list[int]:
    """Returns numbers of bytes."""
    found = []
    for word in text.split(","):
        number, unit = (word[:-2], _UNITS[word[-2:]]) if word[-2:] in _UNITS else (word, 1)
        if not number.strip().isdecimal() or int(number) * unit % 4 or int(number) == 0:
            raise argparse.ArgumentTypeError(
                f"a size is a number of bytes, a multiple of 4, such as 4, 2Ki or 64Mi. Received: {word!r}"
            )
        found.append(int(number) * unit)
    return found


def numbers(text: str) -> list[int]:
    """Returns numbers."""
    if not all(word.isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected numbers, such as 2,4. Received: {text!r}")
    return [int(word) for word in text.split(",")]


def seconds(text: str) -> float:
    """Returns a time to measure."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number of seconds greater than 0. Received: {text!r}")
    return value
