# SPDX-License-Identifier: Apache-2.0
"""What `make resnet50` runs: the recipe on digits, with two batches, on 1 rank and on 2, several seeds.

The folder of --out then holds summary.csv, table.md, rates.png, and a folder for each batch and run. Started again, it
goes on where it was.
"""

from examples import studies, tables
from examples.resnet50 import train

BATCHES = (32, 128)
TRAINED = 4000  # digits
IMAGENET = 1_281_167  # images


def arguments(argv=None):
    parser = studies.parser("resnet50", __doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=8, help="filters of the first convolution (default: 8)")
    return parser.parse_args(argv)


def markdown(table):
    """Returns a table of Markdown, a line for each batch and number of ranks."""
    lines = ["| batch of all ranks | of ImageNet it would be | ranks | test error |", "|---:|---:|---:|---:|"]
    for row in table:
        share = round(row["batch"] / TRAINED * IMAGENET, -2)
        error = f"{100 * row['error']:.2f} ± {100 * row['error spread']:.2f} %"
        lines.append(f"| {row['batch']} | {share:,.0f} | {row['ranks']} | {error} |")
    return "\n".join(lines) + "\n"


def draw(folder, epochs):
    """Draws the learning rate of each batch."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(7, 3.5), layout="constrained")
    lines = []
    for batch in BATCHES:
        steps = -(-TRAINED // batch)
        rate = train.rate_of(batch, epochs * steps)
        rates = [float(rate(step)) for step in range(0, epochs * steps, max(1, steps // 8))]
        times = [step / steps for step in range(0, epochs * steps, max(1, steps // 8))]
        panel.plot(times, rates, label=f"batch {batch}")
        lines += [{"batch": batch, "epoch": t, "rate": r} for t, r in zip(times, rates, strict=True)]
    panel.set(xlabel="epoch", ylabel="learning rate of LARS")
    panel.legend()
    tables.write_figure(folder / "rates.png", figure, "The recipe's learning rate", lines)


def main(argv=None):
    args = arguments(argv)
    train.prepare(args.out)  # before runs of one rank, two of which train at the same time
    table = []
    for batch in BATCHES:
        options = {"epochs": args.epochs, "width": args.width, "global-batch": batch, "digits": args.out}
        found = studies.train("examples.resnet50.train", args.out / f"batch-{batch}", args.seeds, options)
        table += [{"batch": batch, **line} for line in studies.summarize(found)]
    draw(args.out, args.epochs)
    tables.write(args.out / "summary.csv", table)
    text = markdown(table)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    if args.readme:
        studies.publish("resnet50", args.out, text, ["rates.png"])
    print(f"\n{text}")
    return table


if __name__ == "__main__":
    main()
