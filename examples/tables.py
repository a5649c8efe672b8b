# SPDX-License-Identifier: Apache-2.0
"""CSV files of numbers, and figures with the numbers that they show beside them."""

import csv


def write(path, lines):
    """Writes dictionaries with the same keys, one at least, as the lines of a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def read(path):
    """Returns the lines of a CSV file of numbers, as dictionaries; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def write_figure(path, figure, title, lines):
    """Writes a figure of matplotlib as PNG, and what it shows as CSV.

    Args:
        path: of the PNG; the CSV lies beside it.
        figure: it is closed.
        title: above all its panels.
        lines: as for `write`.
    """
    import matplotlib.pyplot as plt

    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    write(path.with_suffix(".csv"), lines)
