# SPDX-License-Identifier: Apache-2.0
"""A table of what was measured on a GPU: `python -m benchmarks.gpu.report FOLDER`, of all FOLDER/*.jsonl."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.gpu import EXPECTED


def table(folder: Path) -> tuple[str, list[str]]:
    """Return a table in Markdown, and the probes that were expected and measured nothing."""
    rows = []
    for file in sorted(folder.glob("*.jsonl")):
        rows += [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]
    rows.sort(key=lambda row: EXPECTED.index(row["probe"]))
    lines = ["| probe | what | measured | target | |", "|---|---|---|---|---|"]
    for row in rows:
        value = "nothing" if row["value"] == -1 else f"{row['value']:.4g} {row['unit']}".strip()
        verdict = {True: "holds", False: "**missed**", None: ""}[row["holds"]]
        lines.append(f"| {row['probe']} | {row['what']} | {value} | {row['target']} | {verdict} |")
    missing = [probe for probe in EXPECTED if probe not in {row["probe"] for row in rows}]
    return "\n".join(lines), missing


if __name__ == "__main__":
    text, missing = table(Path(sys.argv[1]))
    print(text)
    print(f"\nNot measured: {', '.join(missing) or 'nothing'}.")
