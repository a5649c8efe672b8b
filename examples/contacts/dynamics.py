# SPDX-License-Identifier: Apache-2.0
"""Folding of a toy protein: contact maps of a chain of 28 beads that folds into known states.

Overdamped Langevin dynamics of beads on springs that keep apart, in units of a bond (3.8 Å between C-alpha atoms). A
state is a list of pairs that attract each other, as in a Gō model: none (a coil), a helix, a hairpin, three strands,
two helices side by side. From time to time a chain is given another state and folds anew. All chains move at once.
"""

import numpy as np

BEADS = 28
CONTACT = 8.0 / 3.8  # bonds; pairs nearer than this are in contact
STATES = ("coil", "helix", "hairpin", "sheet", "bundle")
_STEP, _TEMPERATURE = 0.004, 0.6
_SPRING, _CORE, _CORE_SIZE = 60.0, 40.0, 1.1
_PULL, _PULL_LENGTH, _REST = 6.0, 1.0, 1.35  # of pairs that attract: force up to _PULL * _PULL_LENGTH, at rest at _REST
_DWELL, _FOLDING = 1500, 700  # steps: mean time in a state, and what folding takes, in which a map has no label


def pairs_of(state):
    """Returns the pairs that attract each other in a state, bool of shape (28, 28)."""
    i, j = np.indices((BEADS, BEADS))
    apart, first, second = np.abs(i - j), np.minimum(i, j), np.maximum(i, j)
    turn = (apart == 3) | (apart == 4)
    found = {
        "coil": np.zeros_like(turn),
        "helix": turn,
        "hairpin": (i + j == BEADS - 1) & (apart > 2),
        "sheet": (((i + j == 18) & (second < 19)) | ((i + j == 37) & (first > 9))) & (apart > 2),
        "bundle": (turn & ((second < 13) | (first > 14))) | ((i + j == BEADS - 1) & (apart > 2) & ((i % 3) == 0)),
    }[state]
    return found | found.T


def simulate(chains, frames, seed):
    """Returns contact maps along the way of some chains.

    Args:
        chains: how many.
        frames: maps of each, 40 steps apart.
        seed: of the noise, the states and their times.

    Returns:
        Maps, uint8 of shape (chains, frames, 28, 28), and states, int of shape (chains, frames), -1 while a chain
        folds.
    """
    rng = np.random.default_rng(seed)
    attracts = np.stack([pairs_of(state) for state in STATES]).astype("float32")
    bonded = np.eye(BEADS, k=1, dtype="float32")
    bonded += bonded.T
    apart = (1 - np.eye(BEADS, dtype="float32")) - bonded
    steps = rng.normal(size=(chains, BEADS, 3))
    x = np.cumsum(steps / np.linalg.norm(steps, axis=-1, keepdims=True), axis=1).astype("float32")
    state, age = rng.integers(len(STATES), size=chains), np.zeros(chains, int)
    maps, states = np.empty((chains, frames, BEADS, BEADS), "uint8"), np.empty((chains, frames), int)
    for step in range(40 * frames + _FOLDING):
        along = x[:, :, None] - x[:, None]
        distance = np.sqrt((along**2).sum(-1)) + np.eye(BEADS, dtype="float32")
        force = -_SPRING * bonded * (distance - 1) + _CORE * apart * np.maximum(_CORE_SIZE - distance, 0)
        force -= _PULL * attracts[state] * np.clip(distance - _REST, -_PULL_LENGTH, _PULL_LENGTH)
        x += _STEP * ((force / distance)[..., None] * along).sum(2)
        x += np.sqrt(2 * _TEMPERATURE * _STEP) * rng.normal(size=x.shape).astype("float32")
        age += 1
        other = rng.random(chains) < 1 / _DWELL
        state[other], age[other] = rng.integers(len(STATES), size=other.sum()), 0
        frame, rest = divmod(step - _FOLDING, 40)
        if frame >= 0 and rest == 0:
            maps[:, frame] = (distance < CONTACT) | np.eye(BEADS, dtype=bool)
            states[:, frame] = np.where(age < _FOLDING, -1, state)
    return maps, states


def write(path, chains, frames, seed):
    """Writes maps (n, 28, 28, 1) and their states (n,) into a .npz file, chain by chain."""
    maps, states = simulate(chains, frames, seed)
    np.savez(path, map=maps.reshape(-1, BEADS, BEADS, 1), state=states.reshape(-1))
