# SPDX-License-Identifier: Apache-2.0
"""Configuration of the documentation site: `make docs`."""

import re
from pathlib import Path

import keras_hpc
from keras_hpc.__main__ import make_parser

ROOT = Path(__file__).resolve().parent.parent

project = "keras_hpc"
author = "the authors of keras_hpc"
release = version = keras_hpc.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "performance/*", "gan3d/*"]
html_theme = "furo"
html_title = f"keras_hpc {release}"
default_role = "code"

# Pages say what was run and when; the site runs nothing. Tests run the blocks: tests/test_readme.py.
nb_execution_mode = "off"
myst_heading_anchors = 4
# Pages link to files of the repository, which the site does not hold. tests/test_pages.py looks whether they are there.
suppress_warnings = ["myst.xref_missing"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True


def _fences_to_directives(app, what, name, obj, options, lines):
    """Docstrings are written in Markdown, as those of Keras are: turn their blocks of code into directives."""
    text, inside = [], False
    for line in lines:
        fence = re.match(r"(\s*)```(\w*)\s*$", line)
        if fence and not inside:
            indent, inside = fence[1], True
            text += ["", f"{indent}.. code-block:: {fence[2] or 'text'}", ""]
        elif fence:
            inside = False
            text.append("")
        else:
            # A bar begins a substitution there, as in |w|.
            text.append(f"   {line}" if inside and line.strip() else line if inside else line.replace("|", r"\|"))
    lines[:] = text


def _write_help(app):
    """The page of the command line: what the commands say of themselves."""
    parser = make_parser("keras-hpc")
    (commands,) = [action for action in parser._actions if hasattr(action, "choices") and action.dest == "command"]
    pages = ["# Commands", "", "`keras-hpc COMMAND` and `python -m keras_hpc COMMAND` are the same.", ""]
    for name, command in commands.choices.items():
        pages += [f"## {name}", "", "```text", command.format_help().rstrip(), "```", ""]
    page = Path(app.srcdir) / "reference" / "commands.md"
    text = "\n".join(pages)
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _fences_to_directives, priority=100)  # before napoleon
    app.connect("builder-inited", _write_help, priority=100)
