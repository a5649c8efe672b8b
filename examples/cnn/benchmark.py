# SPDX-License-Identifier: Apache-2.0
"""How a network trains on 1 rank and on many: throughput, scaling efficiency, and what a step spends its time on.

Synthetic data, `fit`, one core and one thread for each rank. One rank of plain Keras, one rank that reduces its
gradients although there is no other (hooked), and each number of ranks take turns, several rounds, so that a machine
whose speed drifts does not decide; the first steps of each run are not timed. The folder of --out then holds
scaling.csv, scaling.png, profile.csv, profile.png, all of it in benchmark.json, and every step in steps.json.
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path

import numpy as np

from benchmarks.page import PARTS
from examples import launch, tables
from examples.cnn.networks import NETWORKS
from keras_hpc.tools.bench import machine

TIME_LIMIT_S = 900  # of a run


@dataclasses.dataclass(frozen=True)
class Setting:
    """One of the runs that are compared.

    Attributes:
        ranks: how many.
        distributed: with keras_hpc; else plain Keras.
        batch_size: of each rank.
        hooked: one rank reduces, as if there were others.
    """

    ranks: int
    distributed: bool
    batch_size: int
    hooked: bool = False

    @property
    def name(self):
        """As figures and tables call it."""
        if not self.distributed:
            return "Keras"
        if self.hooked:
            return "1 rank, hooked"
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NETWORKS, default="lenet")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2], help="numbers of ranks, as 1,2,4 (default: 1,2)")
    parser.add_argument("--batch-size", type=int, help="of each rank; with --strong of all (default: the network's)")
    parser.add_argument("--image-size", type=int, help="pixels, wide and high (default: the network's)")
    parser.add_argument(
        "--backend", choices=["tensorflow", "jax", "torch"], default=os.environ.get("KERAS_BACKEND", "tensorflow")
    )
    parser.add_argument("--schedule", choices=["synchronous", "pipelined"], default="synchronous")
    parser.add_argument("--strong", action="store_true", help="share one batch out, instead of one for each rank")
    parser.add_argument("--steps", type=int, default=20, help="timed, of each run (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--out", type=Path, help="folder (default: results/benchmark/MODEL-BACKEND)")
    args = parser.parse_args(argv)
    args.batch_size = args.batch_size or NETWORKS[args.model].batch_size
    args.out = args.out or Path("results") / "benchmark" / f"{args.model}-{args.backend}"
    if args.strong and any(args.batch_size % n for n in args.ranks):
        parser.error(f"with --strong, every number of ranks must divide --batch-size. Received: {args.batch_size}")
    return args


def settings(args):
    """Returns what is compared: plain Keras, one rank that reduces for itself alone, then each number of ranks."""
    shares = [args.batch_size // n if args.strong else args.batch_size for n in args.ranks]
    ranks = [Setting(n, True, share) for n, share in zip(args.ranks, shares, strict=True)]
    return [Setting(1, False, args.batch_size), Setting(1, True, args.batch_size, hooked=True), *ranks]


def run(setting, args):
    """Makes a run and returns what it printed: a dictionary, with the measurements of each rank."""
    options = ["--model", args.model, "--batch-size", setting.batch_size, "--steps", args.steps]
    options += ["--image-size", args.image_size] if args.image_size else []
    options += ["--distributed", "--schedule", args.schedule] if setting.distributed else []
    options += ["--hooked"] if setting.hooked else []
    log = args.out / "log.txt"
    with log.open("w") as file:
        launch.run("examples.cnn.benchmark_rank", options, ranks=setting.ranks, timeout=TIME_LIMIT_S, output=file)
    (line,) = (line for line in log.read_text().splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def step_ms(found):
    """Returns the median step of a run, of its slowest rank in each step."""
    return float(np.median(np.max([rank["step_ms"] for rank in found["ranks"]], axis=0)))


def scaling(runs, args):
    """Returns lines for scaling.csv: medians over the rounds, and the extremes of them."""
    (alone,) = (np.median([step_ms(found) for found in rounds]) for setting, rounds in runs if not setting.distributed)
    lines = []
    for setting, rounds in runs:
        times = [step_ms(found) for found in rounds]
        median = float(np.median(times))
        # One rank's work in its own time: N times as much with N ranks, or, of a shared batch, as much in 1/N.
        efficiency = alone / median / (setting.ranks if args.strong else 1)
        whole = median + float(np.median([rank["gap_ms"] for found in rounds for rank in found["ranks"]]))
        lines.append(
            {
                "runs": setting.name,
                "ranks": setting.ranks,
                "batch_size": setting.batch_size,
                "step_ms": median,
                "step_ms lowest": min(times),
                "step_ms highest": max(times),
                "samples/s": 1e3 * setting.ranks * setting.batch_size / whole,
                "efficiency": efficiency,
            }
        )
    return lines


def profile(runs):
    """Returns lines for profile.csv: milliseconds of a step, of each rank and of their mean; medians over rounds."""
    lines = []
    for setting, rounds in runs:
        ranks = []
        for number in range(setting.ranks):
            mine = [found["ranks"][number] for found in rounds]
            names = ("gap", "draw", "forward", "exposed", "hidden", "update")
            parts = {name: float(np.median([one[f"{name}_ms"] for one in mine])) for name in names}
            step = float(np.median([np.median(one["step_ms"]) for one in mine]))
            parts["input"] = parts["gap"] + parts["draw"]
            measured = sum(parts[name] for name in ("draw", "forward", "exposed", "update"))
            parts["backward"] = max(0.0, step - measured)
            ranks.append({name: parts[name] for name in PARTS})
        mean = {name: float(np.mean([rank[name] for rank in ranks])) for name in PARTS}
        lines += [{"runs": setting.name, "rank": n, **parts} for n, parts in enumerate(ranks)]
        lines.append({"runs": setting.name, "rank": "mean", **mean})
    return lines


def draw(table, parts, title, folder):
    """Writes scaling.png and profile.png."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    ours = [line for line in table if line["runs"] not in ("Keras", "1 rank, hooked")]
    ranks = [line["ranks"] for line in ours]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(ranks, [line["samples/s"] for line in ours], "o-", label="keras_hpc")
    left.plot(
        ranks, [table[0]["samples/s"] * n for n in ranks], ":", color="0.5", label="Keras on one rank, times ranks"
    )
    left.set(xscale="log", yscale="log", xlabel="ranks, one core each", ylabel="samples/s")
    left.set_xticks(ranks, [str(n) for n in ranks])
    left.xaxis.minorticks_off()
    left.legend()
    bars = right.bar([str(n) for n in ranks], [line["efficiency"] for line in ours])
    right.bar_label(bars, fmt="{:.2f}")
    right.axhline(1, color="0.5", linestyle=":")
    right.set(xlabel="ranks", ylabel="efficiency", ylim=(0, 1.15))
    figure.suptitle(title)
    figure.savefig(folder / "scaling.png", dpi=120)

    means = [line for line in parts if line["rank"] == "mean"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    bottom = np.zeros(len(means))
    for number, (name, label) in enumerate(PARTS.items()):
        height = np.array([line[name] for line in means])
        look = {"fill": False, "hatch": "//", "edgecolor": "0.5"} if name == "hidden" else {"color": f"C{number}"}
        axes.bar([line["runs"] for line in means], height, bottom=bottom, label=label, width=0.6, **look)
        bottom += height
    axes.set(ylabel="ms of a step", title=title)
    axes.legend()
    figure.savefig(folder / "profile.png", dpi=120)


def main(argv=None):
    args = arguments(argv)
    os.environ["KERAS_BACKEND"] = args.backend
    args.out.mkdir(parents=True, exist_ok=True)
    compared = settings(args)
    cores = len(os.sched_getaffinity(0))
    if max(args.ranks) > cores:
        print(f"{max(args.ranks)} ranks share {cores} cores: their efficiency says nothing of the software.")
    rounds = {setting: [] for setting in compared}
    for number in range(args.rounds):
        for setting in compared:
            found = run(setting, args)
            rounds[setting].append(found)
            print(f"round {number + 1}/{args.rounds}, {setting.name}: {step_ms(found):.1f} ms a step", flush=True)
    runs = list(rounds.items())
    table, parts = scaling(runs, args), profile(runs)

    first = runs[0][1][0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    title = f"{args.model} on {args.backend}, {first['ranks'][0]['parameters']:,} parameters, batch {args.batch_size}"
    title += f" {'of all ranks' if args.strong else 'of each rank'}, {args.schedule}\n{versions}; {machine.describe()}"
    draw(table, parts, title, args.out)
    for name, lines in (("scaling", table), ("profile", parts)):
        tables.write(args.out / f"{name}.csv", lines)
    given = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    checks = {
        setting.name: float(np.median([rank["check_ms"] for one in found for rank in one["ranks"]]))
        for setting, found in runs
        if setting.ranks > 1
    }
    everything = {
        "kind": "training",
        "title": title,
        "arguments": given,
        "machine": machine.describe(),
        "versions": first["versions"],
        "scaling": table,
        "profile": parts,
        "check_replicas_ms": checks,
    }
    (args.out / "benchmark.json").write_text(json.dumps(everything, indent=1) + "\n")
    steps = [{**dataclasses.asdict(setting), "rounds": found} for setting, found in runs]
    (args.out / "steps.json").write_text(json.dumps(steps) + "\n")

    print(f"\n{title}\n\n{'':15}{'ms a step':>10}  {'lowest - highest':18}{'samples/s':>10}{'efficiency':>12}")
    for line in table:
        spread = f"{line['step_ms lowest']:.1f} - {line['step_ms highest']:.1f}"
        rate = f"{line['samples/s']:10.0f}{line['efficiency']:12.2f}"
        print(f"{line['runs']:15}{line['step_ms']:10.1f}  {spread:18}{rate}")
    means = [line for line in parts if line["rank"] == "mean"]
    print("\n" + " " * 25 + "".join(f"{line['runs']:>16}" for line in means))
    for name, label in PARTS.items():
        print(f"{label:25}" + "".join(f"{line[name]:16.2f}" for line in means))
    for name, check in checks.items():
        step = next(line["step_ms"] for line in table if line["runs"] == name)
        print(f"check_replicas on {name}: {check:.1f} ms, {check / step:.2f} % of 100 steps")
    print(f"\n{args.out}/: scaling.png, scaling.csv, profile.png, profile.csv, benchmark.json, steps.json")
    return everything


def _numbers(text):
    numbers = sorted({int(word) for word in text.split(",") if word.strip().isdecimal()})
    if not numbers or numbers[0] < 1 or len(numbers) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"expected numbers of ranks, as 1,2,4. Received: {text!r}")
    return numbers


if __name__ == "__main__":
    main()
