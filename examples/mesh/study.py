# SPDX-License-Identifier: Apache-2.0
"""What `make mesh` runs: both networks with each sample on 1, 2 and 4 ranks, several seeds.

All runs of a seed see the same meshes in the same order, so 2 and 4 ranks should learn what one rank learns, with less
memory each. Each rank has a core of its own as long as there are enough; 4 ranks on 2 cores say nothing about time.
The folder of --out then holds summary.csv, answers.png and a folder for each run. Started again, it goes on where it
was.
"""

import argparse
import itertools
import json
import os
from pathlib import Path

import numpy as np

from examples import launch, tables
from examples.mesh import meshes, train

TIME_LIMIT_S = 1800  # of a run


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results") / "mesh", help="(default: results/mesh)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4], help="ranks of a sample (default: 1 2 4)")
    parser.add_argument("--networks", nargs="+", default=["stack", "unet"])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--epochs", type=int, default=10)
    return parser.parse_args(argv)


def run(kind, args, core=0):
    """Makes a training, unless it was made before. Its messages go to a file in its folder."""
    network, parts, seed = kind
    folder = args.out / f"{network}-{parts}-{seed}"
    if not (folder / "summary.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = {"--network": network, "--parts": parts, "--seed": seed, "--size": args.size, "--count": args.count}
        options |= {"--epochs": args.epochs, "--data": args.out / "meshes", "--out": folder}
        words = list(itertools.chain(*options.items()))
        with (folder / "log.txt").open("w") as log:
            launch.run("examples.mesh.train", words, ranks=parts, core=core, timeout=TIME_LIMIT_S, output=log)
        print((folder / "log.txt").read_text().splitlines()[-1], flush=True)
    return json.loads((folder / "summary.json").read_text())


def summarize(runs):
    """Returns a line for each network and number of parts: means over seeds, and spreads."""
    table = []
    for network, parts in dict.fromkeys((run["network"], tuple(run["parts"])) for run in runs):
        mine = [run for run in runs if (run["network"], tuple(run["parts"])) == (network, parts)]
        line = {"network": network, "ranks": mine[0]["ranks"], "seeds": len(mine)}
        for name in ("iou", "accuracy"):
            values = [run[name] for run in mine]
            line |= {name: float(np.mean(values)), f"{name} spread": float(np.std(values, ddof=len(values) > 1))}
        line |= {name: float(np.median([run[name] for run in mine])) for name in ("seconds of a step", "MiB")}
        table.append(line)
    return table


def draw(args):
    """Draws a test mesh, what becomes of its cells, and what the first run of each network says."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    images, targets = (np.load(args.out / "meshes" / f"{name}.npy", mmap_mode="r") for name in ("images", "targets"))
    number = int(np.argmax(targets[:4].mean(axis=(1, 2, 3))))
    patch = min(40, args.size)
    row, column = _busiest(targets[number, ..., 0], patch)
    figure, axes = plt.subplots(1, 2 + len(args.networks), figsize=(4.2 * (2 + len(args.networks)), 4.4))
    last = 4 * (len(meshes.SEEN) - 1)
    window = (slice(row, row + patch), slice(column, column + patch))
    rows, columns = np.meshgrid(np.arange(patch), np.arange(patch), indexing="ij")
    at = images[number][window][..., last] + rows, images[number][window][..., last + 1] + columns
    for transpose in (False, True):
        lines = [axis.T if transpose else axis for axis in at]
        axes[0].plot(lines[1].T, lines[0].T, color="0.3", linewidth=0.5)
    axes[0].set(title="the mesh, seen last", aspect="equal")
    axes[0].invert_yaxis()
    axes[1].imshow(targets[number][window][..., 0], cmap="Reds")
    axes[1].set_title("cells that will be tangled")
    for panel, network in zip(axes[2:], args.networks, strict=True):
        answers = np.load(args.out / f"{network}-{args.parts[0]}-1" / "answers.npz")["answers"]
        each = args.size // answers.shape[1]
        whole = answers[number, ..., 0].repeat(each, axis=0).repeat(each, axis=1)
        panel.imshow(whole[window], cmap="Reds", vmin=0, vmax=1)
        panel.set_title(f"{network}: probability" + (f", {each} x {each} cells" if each > 1 else ""))
    for panel in axes[1:]:
        panel.set(xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(args.out / "answers.png", dpi=90)


def _busiest(targets, patch):
    """Returns where the window with most tangled cells begins."""
    steps = range(0, len(targets) - patch + 1, 4)
    return max(
        itertools.product(steps, steps), key=lambda at: targets[at[0] : at[0] + patch, at[1] : at[1] + patch].sum()
    )


def main(argv=None):
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "meshes" / "guesses.npy").exists():
        meshes.main(["--size", str(args.size), "--count", str(args.count), "--out", str(args.out / "meshes")])
    kinds = list(itertools.product(args.networks, args.parts, range(1, args.seeds + 1)))
    launch.two_at_a_time(lambda kind, core: run(kind, args, core), [kind for kind in kinds if kind[1] == 1])
    table = summarize([run(kind, args) for kind in kinds])
    tables.write(args.out / "summary.csv", table)
    draw(args)
    tested = round(train.TEST * args.count)
    targets, guesses = (np.load(args.out / "meshes" / f"{name}.npy")[:tested] for name in ("targets", "guesses"))
    each, some = (meshes.iou(meshes.patches(guesses, n), meshes.patches(targets, n)) for n in (1, 4))
    print(f"\n{'':6}{'ranks':>6}{'test IoU':>16}{'accuracy':>18}{'s of a step':>14}{'MiB a rank':>12}")
    for row in table:
        print(
            f"{row['network']:6}{row['ranks']:6}{row['iou']:8.3f} ± {row['iou spread']:.3f}{row['accuracy']:10.2%} ± "
            f"{row['accuracy spread']:.2%}{row['seconds of a step']:14.3f}{row['MiB']:12.0f}"
        )
    print(f"Velocities alone, without a network: IoU {each:.3f} of cells, {some:.3f} of patches of 4 x 4")
    print(f"{args.out / 'answers.png'}: a picture; {len(os.sched_getaffinity(0))} cores")
    return table


if __name__ == "__main__":
    main()
