# SPDX-License-Identifier: Apache-2.0
"""Write showers to an HDF5 file, or their mean profiles to a JSON file.

python -m examples.gan3d.showers --events 10000 --energies 10 100 --size 13 --out showers.h5
mpiexec -n 16 python -m examples.gan3d.showers --events 200000 --energies 10 510 --out showers.h5
python -m examples.gan3d.showers --events 4000 --profiles profiles.json --at 10 50 100

Ranks share the work in blocks of events. A block depends on nothing but the seed and its number, so one rank or many
write the same file. Each block lies in a folder beside the file until all are done: started again after an
interruption, the same command makes only the blocks that are missing.
"""

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from examples.gan3d import storage

SOURCES = {"gflash": "examples.gan3d.gflash", "geant4": "examples.gan3d.geant4"}
HIT_GEV = 1e-4  # a cell counts as hit above this energy


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=list(SOURCES), default="gflash")
    parser.add_argument("--particle", choices=list(storage.PARTICLES), default="electron", help="(default: electron)")
    parser.add_argument("--events", type=int, required=True, help="showers in the file, or per energy of --profiles")
    parser.add_argument("--size", type=int, choices=[25, 13], default=25, help="cells along x, y and depth")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--block", type=int, default=500, help="showers per block of work (default: 500)")
    parser.add_argument(
        "--energies", type=float, nargs=2, metavar=("LOW", "HIGH"), default=[10.0, 100.0], help="GeV, uniform between"
    )
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--out", type=Path, help="HDF5 file to write")
    output.add_argument("--profiles", type=Path, help="write mean profiles to this JSON file instead")
    parser.add_argument(
        "--at", type=float, nargs="+", default=[10.0, 50.0, 100.0], metavar="GEV", help="energies of --profiles"
    )
    args = parser.parse_args(argv)
    low, high = args.energies
    if not 1 <= low <= high:
        parser.error(f"Expected energies of at least 1 GeV, the lower first. Received: --energies {low:g} {high:g}")
    if args.events < 1 or args.block < 1 or args.seed < 0:
        parser.error(
            "Expected --events and --block of at least 1 and --seed of at least 0. "
            f"Received: --events {args.events} --block {args.block} --seed {args.seed}"
        )
    return args


def communicator():
    """The job's `mpi4py` communicator, or `None` for a process on its own.

    Raises:
        RuntimeError: a launcher started several ranks, but mpi4py is missing or does not see them: each would take
            itself for the only one and do all the work.
    """
    counts = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    launched = next((int(os.environ[name]) for name in counts if name in os.environ), 1)
    try:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        size = comm.Get_size()
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library for it
        comm, size, reason = None, 1, str(error)
    else:
        reason = "it was built for another MPI than the launcher's"
    if size == 1 and launched > 1:
        raise RuntimeError(
            f"The launcher started {launched} ranks, which do not see each other. Expected mpi4py with the launcher's "
            f"MPI library. Received: {reason}"
        )
    return comm if size > 1 else None


def generator(source):
    """The module that makes the showers: `generate(rng, energies, size, particle)`, `parameters(particle)`, `LABEL`.

    Raises:
        ImportError: a package is missing that this source needs.
    """
    return importlib.import_module(SOURCES[source])


def block_rng(seed, *numbers):
    """A random generator of its own for each block, whoever makes it."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=numbers))


def make_block(module, number, events, energies, size, seed, particle="electron"):
    """Showers of one block.

    Args:
        module: the source, see `generator`.
        number: of the block, from 0.
        events: in this block.
        energies: lowest and highest primary energy in GeV.
        size: 25 or 13.
        seed: of the whole file.
        particle: "electron" or "photon".

    Returns:
        (images float32 `(events, size, size, size)` in GeV, primary energies float32 `(events,)` in GeV).
    """
    rng = block_rng(seed, 0, number)
    primary = np.clip(rng.uniform(*energies, events).astype(np.float32), *np.float32(energies))
    return module.generate(rng, primary, size, particle), primary


class Progress:
    """One line on stderr: redrawn on a terminal, else printed each time another tenth is done."""

    def __init__(self, total, done, unit="events"):
        self.total, self.first, self.unit = total, done, unit
        self.begin = time.monotonic()
        self.shown = -1

    def show(self, done):
        terminal = sys.stderr.isatty()
        if done == self.shown or (not terminal and self.shown >= 0 and 10 * done // self.total == self.tenth):
            return
        self.shown, self.tenth = done, 10 * done // self.total
        rate = (done - self.first) / max(time.monotonic() - self.begin, 1e-3)
        left = f"{(self.total - done) / rate:.0f} s left" if rate and done < self.total else ""
        bar = "#" * (30 * done // self.total)
        line = f"[{bar:30}] {done}/{self.total} {self.unit}  {rate:.0f}/s  {left}"
        sys.stderr.write(f"\r{line:90}" if terminal else f"{line.rstrip()}\n")
        if terminal and done == self.total:
            sys.stderr.write("\n")
        sys.stderr.flush()


def write_file(args, comm=None):
    """Make the showers of `args` and write `args.out`. Collective over `comm`."""
    rank, size = (comm.Get_rank(), comm.Get_size()) if comm else (0, 1)
    module = generator(args.source)
    low, high = args.energies
    attributes = {
        "source": args.source,
        "particle": args.particle,
        "label": module.LABEL,
        "parameters": json.dumps(module.parameters(args.particle), sort_keys=True),
        "seed": args.seed,
        "events": args.events,
        "block_events": args.block,
        "lowest_energy_GeV": low,
        "highest_energy_GeV": high,
        "size": args.size,
    }
    blocks = storage.Blocks(args.out, attributes)
    missing = blocks.prepare() if rank == 0 else None
    if comm:
        missing = comm.bcast(missing)
    if not missing and args.out.exists():
        if rank == 0:
            print(f"{args.out} is complete: {args.events} events, nothing to do.")
        return
    progress = Progress(args.events, blocks.events_done()) if rank == 0 else None
    for number in missing[rank::size]:
        if progress:
            progress.show(blocks.events_done())
        length = blocks.length(number)
        blocks.write(number, *make_block(module, number, length, args.energies, args.size, args.seed, args.particle))
    if comm:
        # Rank 0 looks at the folder while it waits, so that the bar also shows what the others do.
        arrived = comm.Ibarrier()
        while not arrived.Test():
            if progress:
                progress.show(blocks.events_done())
            time.sleep(0.05)
    if rank == 0:
        progress.show(blocks.events_done())
        blocks.join()
        print(f"{args.out}: {args.events} {args.particle}s of {low:g} to {high:g} GeV. {module.LABEL}.")


def mean_profiles(module, energy, events, size, seed, block=500, comm=None, key=0, particle="electron"):
    """Means over showers of one energy. Collective over `comm`; the result is on rank 0, others get `None`.

    Returns:
        A dictionary: visible energy, its deviation, hit cells, and per axis the mean profile in GeV (`x`, `y`, `z`)
        with the standard deviation between showers (`x_std` ...).
    """
    rank, ranks = (comm.Get_rank(), comm.Get_size()) if comm else (0, 1)
    lengths = [min(block, events - first) for first in range(0, events, block)]
    mine = {}
    for number in range(rank, len(lengths), ranks):
        rng = block_rng(seed, 1, key, number)
        images = module.generate(rng, np.full(lengths[number], energy), size, particle).astype(np.float64)
        sums = {axis: images.sum(other) for axis, other in zip("xyz", ((2, 3), (1, 3), (1, 2)), strict=True)}
        mine[number] = sums | {"hits": (images > HIT_GEV).sum((1, 2, 3))}
    parts = comm.gather(mine) if comm else [mine]
    if rank:
        return None
    done = {number: block for part in parts for number, block in part.items()}
    stack = {name: np.concatenate([done[i][name] for i in range(len(lengths))]) for name in ("x", "y", "z", "hits")}
    visible = stack["z"].sum(1)
    result = {
        "energy_GeV": energy,
        "events": events,
        "visible_GeV": visible.mean(),
        "visible_std_GeV": visible.std(),
        "hits": stack["hits"].mean(),
    }
    for axis in "xyz":
        result[axis] = stack[axis].mean(0)
        result[f"{axis}_std"] = stack[axis].std(0)
    return {name: value if name == "events" else _six_digits(value) for name, value in result.items()}


def _six_digits(value):
    return [_six_digits(x) for x in value] if np.ndim(value) else float(f"{value:.6g}")


def write_profiles(args, comm=None):
    """Write `args.profiles`: mean profiles at the energies `args.at`. Collective over `comm`."""
    module = generator(args.source)
    energies = []
    for key, energy in enumerate(args.at):
        options = {"seed": args.seed, "block": args.block, "comm": comm, "key": key, "particle": args.particle}
        energies.append(mean_profiles(module, energy, args.events, args.size, **options))
        if energies[-1]:
            print(f"{energy:g} GeV: visible {100 * energies[-1]['visible_GeV'] / energy:.3f}%")
    if comm and comm.Get_rank():
        return
    table = {
        "source": args.source,
        "label": module.LABEL,
        "units": f"GeV; profiles are means over showers, _std deviations between them; hits: cells above {HIT_GEV} GeV",
        "seed": args.seed,
        "size": args.size,
        "parameters": module.parameters(args.particle),
        "profiles": energies,
    }
    args.profiles.parent.mkdir(parents=True, exist_ok=True)
    args.profiles.write_text(json.dumps(table, indent=1) + "\n")


def main(argv=None):
    args = arguments(argv)
    comm = communicator()
    run = write_profiles if args.profiles else write_file
    if comm is None:
        try:
            run(args)
        except (ImportError, ValueError) as error:
            sys.exit(f"error: {error}")
        return
    try:
        run(args, comm)
    except Exception:  # whatever it was: the other ranks wait for this one, so it ends them all
        traceback.print_exc()
        sys.stderr.flush()
        time.sleep(0.5)  # the launcher passes it on before it ends all
        comm.Abort(1)
        raise


if __name__ == "__main__":
    main()
