# SPDX-License-Identifier: Apache-2.0
"""Saves all that training depends on, so that a resumed run takes the same steps as one that was never stopped.

Random numbers need no saving: `reseed` makes them anew at each epoch, from the seed, the rank and the epoch.
"""

import os

import keras
import numpy as np

FILE = "checkpoint.npz"


def save(folder, models, facts):
    """Writes weights and optimizers of all models into one file. For rank 0.

    A run that is killed meanwhile leaves the checkpoint before.

    Args:
        folder: a `Path`.
        models: compiled models, always in the same order.
        facts: a dictionary of numbers and strings, as the epoch.
    """
    arrays = {f"variable{i}": keras.ops.convert_to_numpy(v.value) for i, v in enumerate(_variables(models))}
    unfinished = folder / f"unfinished-{FILE}"
    np.savez(unfinished, **arrays, **{f"fact_{name}": value for name, value in facts.items()})
    os.replace(unfinished, folder / FILE)


def facts(folder):
    """Returns the facts that `save` was given.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    with np.load(folder / FILE) as file:
        return {name.removeprefix("fact_"): file[name].item() for name in file.files if name.startswith("fact_")}


def restore(folder, models):
    """Gives models and their optimizers the saved values. On every rank, after the models' first steps.

    Not before: an optimizer has its variables, and keras_hpc has made the ranks' models equal, only then.

    Raises:
        ValueError: the checkpoint is of other models.
    """
    variables = _variables(models)
    with np.load(folder / FILE) as file:
        arrays = [file[f"variable{i}"] for i in range(sum(name.startswith("variable") for name in file.files))]
    shapes = [array.shape for array in arrays]
    if shapes != [tuple(v.shape) for v in variables]:
        raise ValueError(
            "The checkpoint is of other networks. Expected the preset with which it was made. "
            f"Received: {len(arrays)} variables, {len(variables)} expected"
        )
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


def reseed(models, *seed):
    """Gives every dropout layer a stream of random numbers of its own, which depends on nothing else.

    Args:
        models: they may share layers.
        seed: integers, as the rank and the epoch.
    """
    layers = {id(layer): layer for model in models for layer in model._flatten_layers()}
    generators = [layer.seed_generator for layer in layers.values() if hasattr(layer, "seed_generator")]
    for number, generator in enumerate(generators):
        words = np.random.SeedSequence([*seed, number]).generate_state(2) >> 2  # fits every dtype of seeds
        generator.state.assign(words.astype(keras.backend.standardize_dtype(generator.state.dtype)))


def _variables(models):
    """Weights, statistics of BatchNormalization and optimizers' state; each once; neither metrics nor seeds."""
    found = [v for m in models for v in (*m.weights, *m.optimizer.variables)]
    return list({id(variable): variable for variable in found}.values())
