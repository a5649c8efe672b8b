# SPDX-License-Identifier: Apache-2.0
"""Links of README.md for PyPI, which has no files beside it: `python packaging/links.py v0.1.0`, then build."""

import re
import sys
from pathlib import Path

REPOSITORY = "https://github.com/keras-hpc/keras_hpc"


def absolute(text: str, tag: str) -> str:
    """Return Markdown whose links to files of the repository lead to those of a tag.

    Args:
        text: of a page in the root of the repository.
        tag: or a branch.
    """
    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", rf"]({REPOSITORY}/blob/{tag}/\1)", text)


if __name__ == "__main__":
    page = Path(__file__).parent.parent / "README.md"
    page.write_text(absolute(page.read_text(), sys.argv[1]))
