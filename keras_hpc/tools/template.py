# SPDX-License-Identifier: Apache-2.0
"""`keras-hpc template`: job scripts with the settings that matter, filled in as far as options say."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "templates"
_SYSTEMS = {
    "slurm": "a job script for Slurm",
    "pbs": "a job script for PBS",
    "pals": "a job script for PBS where mpiexec is PALS' (HPE machines)",
    "lsf": "a job script for LSF",
    "flux": "a job script for Flux",
    "kubernetes": "a MPIJob for Kubernetes' MPI operator",
    "apptainer-cpu": "a container's definition, for CPUs",
    "apptainer-cuda": "a container's definition, with CUDA",
}
_FILES = {system: next(_FOLDER.glob(f"{system}.*")) for system in _SYSTEMS}
# How a system asks for an account and a queue.
_ACCOUNT = {"slurm": "#SBATCH --account={}", "pbs": "#PBS -A {}", "pals": "#PBS -A {}", "lsf": "#BSUB -P {}"}
_ACCOUNT["flux"] = "# flux: --bank={}"
_QUEUE = {"slurm": "#SBATCH --partition={}", "pbs": "#PBS -q {}", "pals": "#PBS -q {}", "lsf": "#BSUB -q {}"}
_QUEUE["flux"] = "# flux: --queue={}"
_NO_ENVIRONMENT = "# module load ...\n# source /path/to/environment/bin/activate"
_LINE = re.compile(r"[\w.+/:@-]+")


def add_command(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "template",
        help="print a job script to edit",
        description="Prints a job script for a batch system, a MPIJob for Kubernetes or a container's definition, "
        "filled in with what the options say. Read it before you submit it. Options stand behind the SYSTEM: "
        "`%(prog)s slurm --help` shows them.",
    )
    systems = parser.add_subparsers(dest="system", required=True, metavar="SYSTEM")
    for system, file in _FILES.items():
        _add_system(systems, system, file.read_text())
    parser.set_defaults(run=run)


def _add_system(systems: Any, system: str, text: str) -> None:
    """Add what the script for a system has a place for."""
    has_script = "@SCRIPT@" in text
    usage = "%(prog)s [options] [SCRIPT | -m MODULE] [arguments of its own]" if has_script else None
    parser = systems.add_parser(system, help=_SYSTEMS[system], usage=usage, description=f"Prints {_SYSTEMS[system]}.")
    if not has_script:
        return
    parser.add_argument("--nodes", type=_number, default=4, metavar="N", help="(default: 4)")
    parser.add_argument(
        "--ranks-per-node", type=_number, metavar="N", help="(default: one for each GPU asked for, else 1)"
    )
    parser.add_argument("--cores-per-rank", type=_number, default=32, metavar="N", help="(default: 32)")
    parser.add_argument("--gpus-per-node", type=_number, metavar="N", help="(default: none)")
    parser.add_argument("--time", type=_seconds, default=3600, metavar="H:MM:SS", help="limit (default: 1:00:00)")
    parser.add_argument("--job", type=_word, default="train", metavar="NAME", help="of the job (default: train)")
    if "@ACCOUNT@" in text:
        parser.add_argument("--account", type=_word, metavar="NAME", help="who pays for it: account, project or bank")
    if "@QUEUE@" in text:
        parser.add_argument("--queue", type=_word, metavar="NAME", help="queue or partition")
    if "@ENVIRONMENT@" in text:
        parser.add_argument(
            "--env",
            type=_environment,
            action="append",
            default=[],
            metavar="KIND:NAME",
            help="what to load first, in this order: module:NAME, venv:FOLDER or conda:NAME; may be repeated",
        )
    if "@IMAGE@" in text:
        image = "registry.example.org/train:latest"
        parser.add_argument("--image", type=_word, default=image, metavar="NAME", help=f"container (default: {image})")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as after python -m")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT", help="(default: train.py)")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    sys.stdout.write(fill(arguments))
    return 0


def fill(arguments: argparse.Namespace) -> str:
    """Return the text of a script with what the options say."""
    system: str = arguments.system
    text = _FILES[system].read_text()
    if "@SCRIPT@" not in text:
        return text
    gpus: int | None = arguments.gpus_per_node
    ranks: int = arguments.ranks_per_node or gpus or 1
    if gpus and gpus % ranks:
        sys.exit(
            f"keras-hpc template: each rank takes one GPU or a part of the node's. Expected --gpus-per-node as a "
            f"multiple of --ranks-per-node. Received: {gpus} GPUs, {ranks} ranks"
        )
    words: list[str] = arguments.words or ([] if arguments.module else ["train.py"])
    if not words or any("\n" in word for word in words):
        sys.exit(f"keras-hpc template: expected a script, or a module after -m, on one line. Received: {words}")
    words = ["-m", *words] if arguments.module else words
    account, queue = getattr(arguments, "account", None), getattr(arguments, "queue", None)
    hours, seconds = divmod(arguments.time, 3600)
    minutes, seconds = divmod(seconds, 60)
    values = {
        "NODES": arguments.nodes,
        "RANKS": ranks,
        "ALL_RANKS": ranks * arguments.nodes,
        "CORES": arguments.cores_per_rank,
        "NODE_CORES": arguments.cores_per_rank * ranks,
        "ALL_CORES": arguments.cores_per_rank * ranks * arguments.nodes,
        "HH:MM:SS": f"{hours:02}:{minutes:02}:{seconds:02}",
        "HH:MM": "{:02}:{:02}".format(*divmod(-(-arguments.time // 60), 60)),
        "MINUTES": -(-arguments.time // 60),
        "SECONDS": arguments.time,
        "JOB": arguments.job,
        "SCRIPT": json.dumps(words) if system == "kubernetes" else shlex.join(words),
        "IMAGE": getattr(arguments, "image", ""),
        "ENVIRONMENT": "\n".join(getattr(arguments, "env", [])) or _NO_ENVIRONMENT,
        "ACCOUNT": _ACCOUNT[system].format(account) if account else "",
        "QUEUE": _QUEUE[system].format(queue) if queue else "",
        "GPUS": _gpus(system, gpus, ranks),
    }
    lines = []
    for line in text.splitlines():
        filled = re.sub(r"@([A-Z_]+|HH:MM(?::SS)?)@", lambda match: str(values[match[1]]), line)
        if filled or not line:  # a line that nobody asked for is left out
            lines.append(filled)
    return "\n".join(lines) + "\n"


def _gpus(system: str, gpus: int | None, ranks: int) -> str:
    of_rank = gpus // ranks if gpus else 0
    if system == "slurm":
        return "" if gpus else "#"  # commented out, but there to see
    if not gpus:
        return ""
    ways: dict[str, str] = {
        "pbs": f":ngpus={gpus}",
        "pals": f":ngpus={gpus}",
        "flux": f" --gpus-per-task={of_rank} -o gpu-affinity=per-task",
        "lsf": f'#BSUB -gpu "num={gpus}"',
        "kubernetes": f"                  nvidia.com/gpu: {gpus}",
    }
    return ways[system]


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number, at least 1. Received: {text!r}")
    return int(text)


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d{1,4}):([0-5]\d)(?::([0-5]\d))?", text)
    if not match or not any(int(part or 0) for part in match.groups()):
        raise argparse.ArgumentTypeError(f"expected a time such as 2:00:00 or 0:30. Received: {text!r}")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def _word(text: str) -> str:
    if not _LINE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected one word of letters, digits and ._+/:@-. Received: {text!r}")
    return text


def _environment(text: str) -> str:
    kinds: dict[str, Callable[[str], str]] = {
        "module": lambda name: f"module load {' '.join(map(shlex.quote, name.split(',')))}",
        "venv": lambda folder: f"source {shlex.quote(folder)}/bin/activate",
        "conda": lambda name: f'eval "$(conda shell.bash hook)" && conda activate {shlex.quote(name)}',
    }
    kind, _, name = text.partition(":")
    if kind not in kinds or not name or "\n" in name:
        raise argparse.ArgumentTypeError(f"expected module:NAME, venv:FOLDER or conda:NAME. Received: {text!r}")
    return kinds[kind](name)
