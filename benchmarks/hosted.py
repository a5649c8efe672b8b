# SPDX-License-Identifier: Apache-2.0
"""Ranks of a measurement, on this machine or on hosts that are made on it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts, HostsError
from keras_hpc.errors import LaunchError
from keras_hpc.job import launch
from keras_hpc.tools import launchers
from keras_hpc.tools.bench import ranks

OWN_RANKS = "Starts its own ranks, or measures those that a launcher has started."
MBIT = "KERAS_HPC_BENCH_MBIT"  # tells the ranks how fast a network we made for them


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Adds how many ranks are started, and where."""
    parser.add_argument("--ranks", type=int, metavar="N", help="start so many ranks on this machine (default: 2)")
    parser.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="make so many throw-away hosts on this machine, with --ranks ranks each (needs root and iproute2)",
    )
    parser.add_argument(
        "--mbit", type=int, metavar="M", help="bandwidth of each host, Mbit/s each way; 0: no limit (default: 2500)"
    )


def add_command(
    commands: Any,
    name: str,
    text: str,
    description: str,
    run: Callable[[argparse.Namespace], int],
    on_ranks: bool = True,
) -> argparse.ArgumentParser:
    """Adds a subcommand that writes a report, with ranks of its own if it has some.

    Args:
        commands: of the parser.
        name: of the subcommand.
        text: one line on it.
        description: more.
        run: it; returns the exit status.
        on_ranks: whether `world_of` starts its ranks.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description)
    if on_ranks:
        add_ranks(parser)
        parser.set_defaults(plot=None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.set_defaults(run=run)
    return parser


def world_of(arguments: argparse.Namespace) -> launch.World:
    """The ranks to measure: those that a launcher has started. Without any, starts some and exits with their status."""
    ranks.check(None if arguments.hosts else arguments.ranks, arguments.plot)
    if arguments.mbit is not None and not arguments.hosts:
        sys.exit("--mbit is the bandwidth of the hosts that --hosts makes. Give both.")
    if not launch.ranks_started():
        mbit = 2500 if arguments.mbit is None else arguments.mbit
        sys.exit(start_ranks(arguments.ranks or 2, arguments.hosts, mbit))
    return ranks.world(arguments.ranks, arguments.hosts)


def mbit() -> int | None:
    """Bandwidth of the hosts that we have made for these ranks."""
    return int(os.environ[MBIT]) if MBIT in os.environ else None


def start_ranks(
    count: int, hosts: int | None, mbit: int, options: Sequence[str] | None = None, module: str = "benchmarks"
) -> int:
    """Runs a command on `count` ranks, of each host if hosts are wanted; returns its exit status.

    Args:
        count: ranks, in all or on each host.
        hosts: how many to make; None: this machine is the only one.
        mbit: bandwidth of each host, Mbit/s; 0: no limit.
        options: of `python -m MODULE`; None: those of this very command.
        module: what each rank runs.
    """
    if options is None:
        options = ranks.without(sys.argv[1:], ("--ranks", "--hosts", "--mbit"))
    command = [sys.executable, "-m", module, *options]
    if hosts is None:
        return ranks.start(command, count)
    # As Ctrl-C does, it ends the launcher first: one whose hosts are gone would wait for them for ever.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        mpiexec = launchers.find_mpiexec(launchers.find_library())
        environment = os.environ | launchers.mpiexec_environment(count * hosts, placed=True, pinned=True)
        environment.setdefault("OMP_NUM_THREADS", "1")
        with Hosts(hosts, mbit or None) as network, tempfile.TemporaryDirectory() as cache:
            # What is measured there is thrown away with them: other hosts of the same name have other links.
            environment |= {MBIT: str(mbit), "XDG_CACHE_HOME": cache} | network.environment
            everywhere = [(name, count) for name in network.names]
            launcher = launchers.mpiexec_command(mpiexec, count * hosts, everywhere, environment)
            return subprocess.call(network.on_head([*launcher, *command]), env=environment)
    except (LaunchError, HostsError) as error:
        sys.exit(str(error))
