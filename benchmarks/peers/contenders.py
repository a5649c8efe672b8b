# SPDX-License-Identifier: Apache-2.0
"""Who trains on two ranks, by what, and what each is measured against on one."""

import dataclasses

OURS = "examples.cnn.benchmark_rank"
TENSORFLOW = "benchmarks.peers.tensorflow_horovod"
TF_KERAS = "benchmarks.peers.tf_keras_workers"
TORCH = "benchmarks.peers.torch_ddp"


@dataclasses.dataclass(frozen=True)
class Alone:
    """A way to train on one rank.

    Attributes:
        module: what it runs.
        backend: Keras' backend.
        environment: name of the contender in whose environment it runs; none: in this one.
    """

    module: str
    backend: str
    environment: str = ""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train on several ranks.

    Attributes:
        alone: name of the way on one rank that it is measured against, in ALONE.
        module: what a rank runs.
        options: more arguments of it.
        mpi: whether mpiexec starts it; else `ranks.py` starts its ranks.
        packages: of its environment; none: this one.
        installer: a script in this folder that makes the environment; none: pip does.
    """

    alone: str
    module: str
    options: tuple[str, ...] = ()
    mpi: bool = True
    packages: tuple[str, ...] = ()
    installer: str = ""

    @property
    def backend(self):
        """Keras' backend."""
        return ALONE[self.alone].backend


ALONE = {
    "Keras on TensorFlow": Alone(OURS, "tensorflow"),
    "TensorFlow": Alone(TENSORFLOW, "tensorflow"),
    "tf-keras": Alone(TF_KERAS, "tensorflow", "MWMS"),
    "Keras on JAX": Alone(OURS, "jax"),
    "Keras on PyTorch": Alone(OURS, "torch"),
    "PyTorch": Alone(TORCH, "torch", "DDP"),
}
CONTENDERS = {
    # Two at once that have nothing to do with each other: what the machine leaves to those that have.
    "apart": Contender("Keras on TensorFlow", OURS, mpi=False),
    "keras_hpc": Contender("Keras on TensorFlow", OURS, ("--distributed",)),
    "keras_hpc-pipelined": Contender("Keras on TensorFlow", OURS, ("--distributed", "--schedule", "pipelined")),
    "mpi4py": Contender(
        "Keras on TensorFlow",
        "benchmarks.peers.mpi4py_keras",
        packages=("tensorflow", "keras", "mpi4py", "mpi"),
    ),
    "Horovod": Contender("TensorFlow", TENSORFLOW, packages=("tensorflow", "keras"), installer="install_horovod.sh"),
    "MWMS": Contender("tf-keras", TF_KERAS, mpi=False, packages=("tensorflow", "tf-keras")),
    "apart-jax": Contender("Keras on JAX", OURS, mpi=False),
    "keras_hpc-jax": Contender("Keras on JAX", OURS, ("--distributed",)),
    "DataParallel-jax": Contender(
        "Keras on JAX", "benchmarks.peers.keras_data_parallel", mpi=False, packages=("jax", "keras")
    ),
    "apart-torch": Contender("Keras on PyTorch", OURS, mpi=False),
    "keras_hpc-torch": Contender("Keras on PyTorch", OURS, ("--distributed",)),
    "DDP-keras": Contender("Keras on PyTorch", TORCH, ("--keras",), mpi=False, packages=("torch", "keras")),
    "DDP": Contender("PyTorch", TORCH, mpi=False, packages=("torch", "transformers", "keras")),
}
