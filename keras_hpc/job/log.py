# SPDX-License-Identifier: Apache-2.0
"""Lines for the user, through the logger `keras_hpc`."""

from __future__ import annotations

import logging

_log = logging.getLogger("keras_hpc")
_handler: logging.Handler | None = None


def info(text: str) -> None:
    """Log one line of information from this rank."""
    _show_notices()
    _log.info(text)


def warning(text: str) -> None:
    """Log one warning from this rank."""
    _show_notices()
    _log.warning(text)


def reset() -> None:
    """Take out what `info` has put into Python's logging."""
    global _handler
    if _handler is not None:
        _log.removeHandler(_handler)
        _log.propagate = True
        _log.setLevel(logging.NOTSET)
        _handler = None


def _show_notices() -> None:
    # Only where nobody configured logging: then INFO would be lost.
    global _handler
    if not _log.handlers and not logging.getLogger().handlers:
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        _log.addHandler(_handler)
        _log.propagate = False
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
