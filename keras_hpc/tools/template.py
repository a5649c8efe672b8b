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
_FILES = {file.stem: file for file in sorted(_FOLDER.iterdir()) if file.suffix in (".sh", ".yaml", ".def")}
# How a system asks for an account and a queue, and for GPUs; in a template without either the option is refused.
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
        "filled in with what the options say. Read it before you submit it.",
    )
    parser.add_argument("system", choices=list(_FILES), help="what the script is for")
    parser.add_argument("--nodes", type=_number, default=4, metavar="N", help="(default: 4)")
    parser.add_argument(
        "--ranks-per-node", type=_number, metavar="N", help="(default: one for each GPU asked for, else 1)"
    )
    parser.add_argument("--cores-per-rank", type=_number, default=32, metavar="N", help="(default: 32)")
    parser.add_argument("--gpus-per-node", type=_number, metavar="N", help="(default: none)")
    parser.add_argument("--time", type=_seconds, default=3600, metavar="H:MM:SS", help="limit (default: 1:00:00)")
    parser.add_argument("--account", type=_word, metavar="NAME", help="who pays for it: account, project or bank")
    parser.add_argument("--queue", type=_word, metavar="NAME", help="queue or partition")
    parser.add_argument("--job", type=_word, default="train", metavar="NAME", help="of the job (default: train)")
    parser.add_argument(
        "--env",
        type=_environment,
        action="append",
        default=[],
        metavar="KIND:NAME",
        help="what to load first, in this order: module:NAME, venv:FOLDER or conda:NAME; may be repeated",
    )
    parser.add_argument("--script", default="train.py", metavar="WORDS", help="and its arguments, as one word")
    parser.add_argument("--image", type=_word, metavar="NAME", help="container (kubernetes)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    sys.stdout.write(fill(arguments))
    return 0


def fill(arguments: argparse.Namespace) -> str:
    """Return the text of a script with what the options say."""
    system: str = arguments.system
    text = _FILES[system].read_text()
    gpus: int | None = arguments.gpus_per_node
    ranks: int = arguments.ranks_per_node or gpus or 1
    given = {"--account": arguments.account, "--queue": arguments.queue, "--image": arguments.image}
    given |= {"--gpus-per-node": gpus, "--env": arguments.env}
    places = ("ACCOUNT", "QUEUE", "IMAGE", "GPUS", "ENVIRONMENT")
    for (option, value), place in zip(given.items(), places, strict=True):
        if value and f"@{place}@" not in text:
            sys.exit(f"keras-hpc template: {option} has no place in a script for {system}. Received: {option}")
    if gpus and gpus % ranks:
        sys.exit(
            f"keras-hpc template: each rank takes one GPU or a part of the node's. Expected --gpus-per-node as a "
            f"multiple of --ranks-per-node. Received: {gpus} GPUs, {ranks} ranks"
        )
    hours, seconds = divmod(arguments.time, 3600)
    minutes, seconds = divmod(seconds, 60)
    words = shlex.split(arguments.script)
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
        "IMAGE": arguments.image or "registry.example.org/train:latest",
        "ENVIRONMENT": "\n".join(arguments.env) or _NO_ENVIRONMENT,
        "ACCOUNT": _ACCOUNT[system].format(arguments.account) if arguments.account else "",
        "QUEUE": _QUEUE[system].format(arguments.queue) if arguments.queue else "",
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
