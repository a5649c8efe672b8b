# SPDX-License-Identifier: Apache-2.0
"""Compares what ranks ask of `fit`: where it is not the same, some of them wait for ever in a step of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_hpc.job import current, log


def check(model: Any, arguments: Mapping[str, Any]) -> None:
    """Compare the epochs and the validation that ranks ask for. Collective on all ranks of the team.

    Rank 0 warns, once, if their models have other names: a rank may have left out a `fit`, and trains its next model
    with the others' last one, if that has the same shapes.

    Args:
        model: that is trained.
        arguments: of `fit`, by their names.

    Raises:
        ValueError: on every rank, if they differ.
    """
    team = current.team_of(model)
    validates = arguments.get("validation_data") is not None or bool(arguments.get("validation_split"))
    mine = {
        "validation data": "some" if validates else "none",
        "epochs": str(arguments.get("epochs", 1)),
        "validation_freq": str(arguments.get("validation_freq", 1)),
    }
    everyone, names = zip(*team.allgather_object([mine, model.name], "what to do in Model.fit()"), strict=True)
    if len(set(names)) > 1 and team.rank == 0 and not current.job().known.names_told:
        current.job().known.names_told = True
        other = next(rank for rank, name in enumerate(names) if name != names[0])
        log.warning(
            f"Model.fit() trains `{names[0]}` on rank 0 of the team, and `{names[other]}` on rank {other}: these are "
            "trained as one model. If a rank has left out a model, as after an exception, end the job; if it has made "
            "one more, give models a `name`."
        )
    for what, first in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs[what] != first]
        if others:
            raise ValueError(
                f"All ranks must give Model.fit() the same {what}: they train and validate together. What rank 0 alone "
                "is to print or save goes into callbacks and `verbose`. "
                f"Received: {first} on rank 0 of the team, {everyone[others[0]][what]} on rank {others[0]}"
            )
