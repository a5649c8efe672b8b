# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_hpc run`: starts a script on several ranks, with the launcher that fits, each on its own cores."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_hpc.errors import LaunchError
from keras_hpc.job import launch
from keras_hpc.tools import elastic, launchers, places, rank

_ANSWER_SECONDS = 10.0  # after which a host is taken to be gone
_HOW_MANY = "how many ranks? Expected -n N. Received: no -n, and no number of tasks of Slurm (SLURM_NTASKS)"


def add_command(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "run",
        help="start a script on several ranks",
        usage="%(prog)s [options] (SCRIPT | -m MODULE) [arguments of its own]",
        description="Starts a Python script on several ranks: with srun inside a Slurm allocation, else with the "
        "mpiexec of the MPI library that mpi4py loads. mpiexec's ranks each get their share of the node's cores, and "
        "where there are enough NVIDIA GPUs one of these and the cores beside it; srun binds its own. "
        "Becomes the launcher, so signals and exit status are the launcher's.",
    )
    parser.add_argument("-n", "--ranks", type=_positive, metavar="N", help="ranks (default in Slurm: its tasks)")
    parser.add_argument(
        "--hosts", type=_hosts, default=[], metavar="A,B", help="hosts to start them on; A:2,B:1 says how many on each"
    )
    parser.add_argument(
        "--launcher", choices=["mpiexec", "srun"], help="default: srun inside a Slurm allocation, else mpiexec"
    )
    parser.add_argument("--mpiexec", type=Path, metavar="FILE", help="this one instead of the one that we find")
    parser.add_argument(
        "--launcher-args", type=shlex.split, default=[], metavar="WORDS", help="more options for it, as one word"
    )
    parser.add_argument(
        "--cores", type=_positive, metavar="N", help="cores of each rank (default: its share of the node)"
    )
    parser.add_argument("--no-pin", action="store_true", help="leave cores and GPUs to the launcher")
    parser.add_argument(
        "--threads", type=_positive, metavar="N", help="compute threads of each rank (default: by its cores)"
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="write each rank's output to DIR/rankN.txt")
    parser.add_argument("--no-label", action="store_true", help="do not begin lines of output with their rank")
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="when a rank is killed, start again with one less, and without hosts that do not answer; a Checkpoint of "
        "the script goes on from its last save",
    )
    parser.add_argument(
        "--rejoin",
        action="store_true",
        help="with --elastic: at the end of an epoch, start again with the ranks that were lost, where there is place",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command instead")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as after python -m")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    parser.set_defaults(run=run, append=False)


def run(arguments: argparse.Namespace) -> int:
    """Becomes the launcher; returns only after `--dry-run`, or with `--elastic` the exit status of the last job."""
    try:
        command, environment = _command(arguments)
        wanted = _wanted(arguments)
    except LaunchError as error:
        sys.exit(f"keras_hpc run: {error}")
    if arguments.dry_run:
        print(shlex.join([*(f"{name}={value}" for name, value in environment.items()), *command]))
        return 0
    if arguments.output_dir:
        try:
            arguments.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f"keras_hpc run: `--output-dir` is a folder to write to. Received: {error}")
        print(f"keras_hpc run: output in {arguments.output_dir}/rank*.txt", flush=True)
    if arguments.elastic:
        starts = itertools.count()

        def job_of(placement: places.Placement) -> tuple[list[str], dict[str, str]]:
            again = {"ranks": placement.ranks, "hosts": list(placement.hosts), "append": next(starts) > 0}
            return _command(argparse.Namespace(**vars(arguments) | again))

        try:
            return elastic.supervise(job_of, _machine(arguments, wanted, command[0]), rejoin=arguments.rejoin)
        except LaunchError as error:
            sys.exit(f"keras_hpc run: {error}")
    os.execvpe(command[0], command, os.environ | environment)


def _wanted(arguments: argparse.Namespace) -> places.Placement:
    """Where an elastic job starts at first."""
    if not arguments.elastic:
        if arguments.rejoin:
            raise LaunchError("`--rejoin` is for jobs that lose ranks. Expected --elastic. Received: --rejoin")
        return places.Placement(0)
    hosts = tuple(_spread(arguments.ranks, arguments.hosts))
    ranks = sum(count for _, count in hosts) or arguments.ranks or _tasks()
    if ranks is None:
        raise LaunchError(_HOW_MANY)
    return places.Placement(ranks, hosts)


def _tasks() -> int | None:
    """Return how many tasks the Slurm allocation is for; None where nobody has said it."""
    return int(os.environ["SLURM_NTASKS"]) if "SLURM_NTASKS" in os.environ else None


def _machine(arguments: argparse.Namespace, wanted: places.Placement, launcher: str) -> places.Machine:
    """Where an elastic job can start its ranks.

    Args:
        arguments: of the command line.
        wanted: where it starts at first.
        launcher: the program.
    """
    if launcher == "srun":
        if "SLURM_JOB_ID" not in os.environ:
            raise LaunchError("`--elastic` with srun starts again on what is left of an allocation. Received: none")
        return places.Allocation(wanted)
    if not wanted.hosts:
        return places.Machine(wanted)
    mpiexec = launchers.mpiexec_at(Path(launcher))

    def answers(host: str) -> bool:
        command = launchers.mpiexec_command(mpiexec, 1, [(host, 1)])
        command = [command[0], *arguments.launcher_args, *command[1:], "true"]
        environment = os.environ | launchers.mpiexec_environment(1, placed=True, pinned=False)
        return launchers.ends_well(command, environment, _ANSWER_SECONDS)

    return places.Hosts(wanted, answers)


def _command(arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command that starts the ranks, and what it needs in the environment."""
    command, environment = _launcher(arguments)
    command += [sys.executable, "-I", rank.__file__, *_wishes(arguments, pin=command[0] != "srun"), "--"]
    command += [sys.executable, *(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    return command, environment


def _launcher(arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The launcher's part of the command, and what it needs in the environment."""
    if started := launch.ranks_started():
        raise LaunchError(f"this would start ranks from each rank. {started}. Leave one of the two launchers out.")
    if not arguments.module and not Path(arguments.script).is_file():
        raise LaunchError(f"there is no such script. Expected a file, or -m MODULE. Received: {arguments.script}")
    hosts = _spread(arguments.ranks, arguments.hosts)
    ranks = sum(count for _, count in hosts) or arguments.ranks
    in_slurm = "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None and not arguments.mpiexec
    mpi = launchers.find_library()
    if arguments.launcher == "srun" or (arguments.launcher is None and in_slurm):
        for option, given in (("--hosts", hosts), ("--cores", arguments.cores), ("--no-pin", arguments.no_pin)):
            if given:
                raise LaunchError(
                    f"Slurm places and binds ranks: ask sbatch or srun for it. Received: {option} (with --launcher "
                    "mpiexec it is possible)"
                )
        return [*launchers.srun_command(mpi, ranks), *arguments.launcher_args], {}
    if ranks is None and in_slurm:
        ranks = _tasks()
    if ranks is None:
        raise LaunchError(_HOW_MANY)
    mpiexec = launchers.mpiexec_at(arguments.mpiexec) if arguments.mpiexec else launchers.find_mpiexec(mpi)
    command = launchers.mpiexec_command(mpiexec, ranks, hosts)
    placed = bool(hosts) or any(name in os.environ for name in ("SLURM_JOB_ID", "PBS_NODEFILE"))
    environment = launchers.mpiexec_environment(ranks, placed=placed, pinned=not arguments.no_pin)
    return [command[0], *arguments.launcher_args, *command[1:]], environment


def _wishes(arguments: argparse.Namespace, *, pin: bool) -> Sequence[str]:
    """What each rank is told."""
    words = ["--pin"] if pin and not arguments.no_pin else []
    words += ["--label"] if not arguments.no_label else []
    for option in ("cores", "threads"):
        if getattr(arguments, option):
            words += [f"--{option}", str(getattr(arguments, option))]
    if arguments.output_dir:
        words += ["--output-dir", str(arguments.output_dir.absolute())]
        words += ["--append"] if arguments.append else []
    return words


def _spread(ranks: int | None, hosts: Sequence[tuple[str, int | None]]) -> list[tuple[str, int]]:
    """How many ranks each host gets: what the user says, else equal parts in blocks."""
    counts = [count for _, count in hosts]
    if not hosts:
        return []
    if all(count is not None for count in counts):
        total = sum(count for count in counts if count)
        if ranks not in (None, total):
            raise LaunchError(f"`-n` and `--hosts` disagree. Expected {total} ranks. Received: -n {ranks}")
        return [(name, count) for name, count in hosts if count]
    if any(count is not None for count in counts) or ranks is None or ranks % len(hosts):
        raise LaunchError(
            f"`--hosts` gets equal numbers of ranks. Expected -n as a multiple of {len(hosts)}, or a number for each "
            f"host as in a:2,b:1. Received: -n {ranks} --hosts {','.join(f'{n}:{c}' if c else n for n, c in hosts)}"
        )
    return [(name, ranks // len(hosts)) for name, _ in hosts]


def _hosts(text: str) -> list[tuple[str, int | None]]:
    hosts = []
    for word in text.split(","):
        name, colon, count = word.partition(":")
        if not name or (colon and not count.isdecimal()) or count == "0":
            raise argparse.ArgumentTypeError(
                f"hosts are names, or names with numbers of ranks, a:2,b:1. Received: {text!r}"
            )
        hosts.append((name, int(count) if count else None))
    return hosts


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number, at least 1. Received: {text!r}")
    return int(text)
