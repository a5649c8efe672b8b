# SPDX-License-Identifier: Apache-2.0
"""Compares what ranks ask of `fit`: where it is not the same, some of them wait for ever in a step of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check(team: Any, arguments: Mapping[str, Any]) -> None:
    """Compare the epochs and the validation that ranks ask for. Collective on all ranks of the team.

    Args:
        team: of the model.
        arguments: of `fit`, by their names.

    Raises:
        ValueError: on every rank, if they differ.
    """
    frequency = arguments.get("validation_freq", 1)
    mine = {
        "validation data": arguments.get("validation_data") is not None or bool(arguments.get("validation_split")),
        "epochs": int(arguments.get("epochs", 1)),
        "validation_freq": frequency if isinstance(frequency, int) else list(frequency),
    }
    everyone = team.allgather_object(mine, "what to do in Model.fit()")
    for what, first in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs[what] != first]
        if others:
            raise ValueError(
                f"All ranks must give Model.fit() the same {what}: they train and validate together. What rank 0 alone "
                "is to print or save goes into callbacks and `verbose`. "
                f"Received: {_shown(first)} on rank 0 of the team, {_shown(everyone[others[0]][what])} on rank "
                f"{others[0]}"
            )


def _shown(value: Any) -> str:
    return {True: "some", False: "none"}[value] if isinstance(value, bool) else str(value)
