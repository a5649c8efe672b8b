# SPDX-License-Identifier: Apache-2.0
"""Random states of libraries, for checkpoints: those that scripts draw from, and PyTorch's inside of steps."""

from __future__ import annotations

import keras
import numpy as np

from keras_hpc.job import current
from keras_hpc.keras_hooks.state import seeds

# Of virtual ranks, their streams of random numbers inside of steps.
_STREAMS_OF_PARTS = {
    "torch of part {}": "torch of steps of parts",
    "torch outside of part {}": "torch when parts began",
}
# This rank's streams of random numbers inside of steps, with the names under which they are saved.
_STREAMS = {"torch": "torch of steps", "torch outside": "torch when they began"}


def take() -> dict[str, np.ndarray]:
    """Return the states of all generators that data sets and layers without a seed draw from. Collective."""
    states = seeds.host_states()
    if keras.backend.backend() == "torch":
        import torch

        for own in sorted(current.job().streams.keys() & _STREAMS.keys()):
            states[_STREAMS[own]] = current.job().streams[own].numpy().copy()
        virtual, streams = current.job().virtual, current.job().streams
        for own, name in _STREAMS_OF_PARTS.items():
            if virtual is not None and own.format(virtual.mine[0]) in streams:
                rows = np.stack([streams[own.format(part)].numpy() for part in virtual.mine])
                states[name] = current.job().teams[0].allgather(rows, "Checkpoint: random states of virtual ranks")
        if torch.cuda.is_available():
            states["torch.cuda"] = torch.cuda.get_rng_state().numpy()
    return states


def put_back(name: str, value: np.ndarray) -> None:
    """Put back one of what `take` returns."""
    if name == "torch.cuda":
        import torch

        torch.cuda.set_rng_state(torch.from_numpy(value.copy()))
    elif name in _STREAMS_OF_PARTS.values():
        import torch

        (own,) = (key for key, saved in _STREAMS_OF_PARTS.items() if saved == name)
        virtual = current.job().virtual
        assert virtual is not None  # noqa: S101  `check` has compared it
        for part in virtual.mine:
            current.job().streams[own.format(part)] = torch.from_numpy(value[part].copy())
    elif name in _STREAMS.values():
        import torch

        (own,) = (key for key, saved in _STREAMS.items() if saved == name)
        current.job().streams[own] = torch.from_numpy(value.copy())
    else:
        seeds.set_host_state(name, value)
