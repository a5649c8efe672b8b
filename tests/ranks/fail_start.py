"""Things that must stop `init()`: `fail_start.py HOW`. Without HOW, `init()` must work."""

import sys

how = sys.argv[1] if len(sys.argv) > 1 else ""

if how == "no-threads":
    import mpi4py

    mpi4py.rc.thread_level = "single"

if how == "no-native":
    # As in a checkout that was never built: without the finder of an editable install, the folder is all there is.
    from pathlib import Path

    sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras_hpc  # noqa: E402 - what is above must come first

if how == "moved-method":
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    BaseOptimizer._clip_gradients_of_tomorrow = BaseOptimizer._clip_gradients
    del BaseOptimizer._clip_gradients

if how == "moved-module":
    import keras.src.trainers.epoch_iterator as module

    del module.EpochIterator

if how == "keras-distribution":
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))

if how == "torch-distributed":
    import tempfile

    import torch

    store = torch.distributed.FileStore(tempfile.mkstemp()[1], 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

if how == "bad-backend":
    import os

    assert os.environ["KERAS_BACKEND"] == "numpy"

keras_hpc.init(device=0 if how == "no-gpu" else "auto")
sys.stdout.write(f"init worked on {keras_hpc.size()} ranks\n")
