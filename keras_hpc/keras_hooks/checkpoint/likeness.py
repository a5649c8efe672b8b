# SPDX-License-Identifier: Apache-2.0
"""Whether models are like those of a checkpoint: the same optimizers, and variables that match one by one.

Names tell more than shapes do, as RMSprop's momenta from its mean gradients. But users rename layers, and Keras counts
them (`dense_1`) through a process. So what a class calls its variable counts, and the order; other names are mentioned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from keras_hpc.keras_hooks.state import variables

Described = list[Any]  # path, dtype, shape

_NOTHING: Described = ["", "", []]
_ANOTHER = (
    "The checkpoint is of another model, optimizer or metrics, or what it holds is not built yet. Expected the same "
    "model, compiled alike; where Keras cannot build it from data, build model and optimizer before `fit`. Another "
    "path begins anew. Received: "
)
_COUNTER = re.compile(r"_\d+(?=[_/]|$)")  # of Keras, or of the user


def optimizers_of(models: Sequence[Any]) -> list[list[str]]:
    """Return the classes of the optimizers of each model, and of those that they hold."""
    return [[type(optimizer).__name__ for optimizer in variables.optimizers_of(model)] for model in models]


def check_optimizers(theirs: list[list[str]], mine: list[list[str]]) -> None:
    """Raise unless optimizers are of the same classes.

    Raises:
        ValueError: of others.
    """
    if theirs != mine:
        then, now = (", ".join(name for model in names for name in model) or "none" for names in (theirs, mine))
        raise ValueError(f"{_ANOTHER}the optimizer is {then} in the checkpoint and {now} here")


def check_variables(theirs: Sequence[Described], mine: Sequence[Described]) -> str:
    """Raise unless variables are alike.

    Args:
        theirs: of the checkpoint.
        mine: of this process.

    Returns:
        What is to be said of other names, or nothing.

    Raises:
        ValueError: naming the first difference.
    """
    for index in range(max(len(mine), len(theirs))):
        a, b = (known[index] if index < len(known) else _NOTHING for known in (theirs, mine))
        if a[1:] != b[1:] or _own_name(a) != _own_name(b):
            raise ValueError(f"{_ANOTHER}variable {index} is {_text(a)} in the checkpoint and {_text(b)} here")
    names = [[_COUNTER.sub("", path) for path, *_ in known] for known in (theirs, mine)]
    differing = [index for index, (then, now) in enumerate(zip(*names, strict=True)) if then != now]
    if not differing:
        return ""
    then, now = (_text(known[differing[0]]) for known in (theirs, mine))
    if sorted(names[0]) == sorted(names[1]):
        raise ValueError(f"{_ANOTHER}the same in another order: {then} in the checkpoint is where {now} is here")
    return f"variables have other names ({then} of the checkpoint is {now} here, {len(differing)} in all)"


def _own_name(described: Described) -> str:
    """What a class calls its variable: `kernel` of a layer; `momentum` of an optimizer, behind its variable's path."""
    return re.split("[_/]", _COUNTER.sub("", described[0]))[-1]


def _text(described: Described) -> str:
    path, dtype, shape = described
    return f"`{path}` of {dtype}{shape}" if dtype else "no variable"
