# SPDX-License-Identifier: Apache-2.0
"""`keras-hpc demo`: a small network learns real digits, on one rank and on two; needs nothing but what is installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from keras_hpc.job import launch

BACKENDS = ("tensorflow", "jax", "torch")
_TIME_LIMIT_S = 600


def add_command(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "demo",
        help="train on real digits, on 1 rank and on 2",
        description="Trains a small convolutional network on 1,797 real handwritten digits, which the package brings, "
        "on one rank and on two, each with a core and a thread of its own, and says how fast and how well. Both runs "
        "have the same global batches, so they learn alike.",
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, help="(default: KERAS_BACKEND, else the first of these that is installed)"
    )
    parser.add_argument("--epochs", type=int, default=12, metavar="N", help="passes over the digits (default: 12)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train on one rank and on two, in processes of their own, and print what came of it."""
    if arguments.epochs < 3:
        sys.exit(f"The first two epochs warm up: `--epochs` is at least 3. Received: {arguments.epochs}")
    if started := launch.ranks_started():
        sys.exit(f"keras-hpc demo starts its own ranks, but there is a launcher already: {started}. Leave it out.")
    backend = arguments.backend or _backend()
    cores = len(os.sched_getaffinity(0))
    print(
        f"1,797 handwritten digits, a small CNN, {arguments.epochs} epochs, {backend}; {cores} cores here", flush=True
    )
    one = _train(1, backend, arguments.epochs, cores)
    _show(one)
    two = _train(2, backend, arguments.epochs, cores)
    _show(two)
    ratio = two["samples_per_second"] / one["samples_per_second"]
    print(f"ratio    {ratio:.2f} times as many samples/s; weights of both ranks: the same bits, {two['hash']}")
    if cores < 2:
        print("Both ranks shared a core here: the ratio says nothing.")
    elif os.getloadavg()[0] > cores + 1:  # one more, for what starts and ends
        print("Other programs use these cores: the ratio says little.")
    return 0


def _backend() -> str:
    """Choose the backend that Keras is told to use, or the first that is installed."""
    if wanted := os.environ.get("KERAS_BACKEND"):
        if wanted not in BACKENDS:
            sys.exit(f"KERAS_BACKEND names no backend of keras_hpc. Expected {', '.join(BACKENDS)}. Received: {wanted}")
        return wanted
    found = next((name for name in BACKENDS if importlib.util.find_spec(name)), None)
    if found is None:
        sys.exit("No backend is installed. Install one of them, as by: pip install 'keras_hpc[tensorflow]'")
    return found


def _train(ranks: int, backend: str, epochs: int, cores: int) -> dict[str, Any]:
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ | {"KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    environment["PYTHONSAFEPATH"] = "1"  # in a clone, the folder of sources is not what was installed
    # An own core for each rank, the only one as well: that is what is compared.
    pinned = ["--cores", "1"] if cores >= ranks else ["--no-pin"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "keras_hpc", "run", "-n", str(ranks), *pinned, "--threads", "1", "--no-label"]
        command += ["-m", "keras_hpc.tools.demo.train", "--epochs", str(epochs), "--out", str(out)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode(errors="replace") + (error.stderr or b"").decode(errors="replace")
            sys.exit(f"{said}\nTraining on {ranks} rank(s) did not end in {_TIME_LIMIT_S} s.")
        if done.returncode != 0:
            sys.exit(f"{done.stdout}{done.stderr}\nTraining on {ranks} rank(s) ended with {done.returncode}.")
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def _show(result: dict[str, Any]) -> None:
    ranks = result["ranks"]
    print(
        f"{ranks} rank{'s' if ranks > 1 else ' '}  {result['samples_per_second']:>7,.0f} samples/s   "
        f"loss {result['loss']:.4f}   {result['test_accuracy']:.1%} of the test digits right",
        flush=True,
    )
