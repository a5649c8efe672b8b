# SPDX-License-Identifier: Apache-2.0
"""When a training step of a Keras application has which gradient: a real job, traced. For the simulator."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import keras_hpc
from keras_hpc.tools import timeline

SIZES = {"ResNet50": 224, "InceptionV3": 299}  # pixels


def record(name: str, batch_size: int, steps: int, out: Path) -> None:
    """Trains a model on noise; rank 0 writes the timeline of its steps. Collective."""
    import keras

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        keras_hpc.init(trace=str(trace), shard=False)
        model = getattr(keras.applications, name)(weights=None, input_shape=(SIZES[name], SIZES[name], 3))
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy")
        random = np.random.default_rng(keras_hpc.rank())
        x = random.random((batch_size * steps, SIZES[name], SIZES[name], 3), dtype=np.float32)
        y = random.integers(0, 1000, len(x))
        model.fit(x, y, batch_size=batch_size, verbose=0)
        first = keras_hpc.rank() == 0
        keras_hpc.finalize()
        if first:
            found = timeline.read(trace)
            found.write(out)
            spread = f"{min(found.variation):.2f} to {max(found.variation):.2f}"
            print(
                f"{name}: {len(found.elements)} gradients, {found.parameters:,} elements; a step of "
                f"{found.step_s:.3f} s, of which the update {found.update_s:.3f} s; steps of {spread} of the median"
            )
