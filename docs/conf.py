# SPDX-License-Identifier: Apache-2.0
"""Configuration of the documentation site: `make docs`."""

import argparse
import atexit
import os
import re
import shutil
import tempfile
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

# Notebooks are run whenever the site is built, with little data: pages say what was run at length, and when. Tests run
# the blocks of pages: tests/test_readme.py.
nb_execution_mode = "off" if os.environ.get("DOCS_WITHOUT_NOTEBOOKS") else "force"
nb_execution_timeout = 300  # seconds, of a cell
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_output_stderr = "remove"
nb_merge_streams = True
_results = tempfile.mkdtemp(prefix="keras_hpc-docs-")
atexit.register(shutil.rmtree, _results, ignore_errors=True)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
for _name in ("GAN3D_OUT", "SCALING_RESULTS"):
    os.environ[_name] = _results
for _name, _value in {"GAN3D_EVENTS": "2000", "GAN3D_EPOCHS": "2", "GAN3D_STEPS": "20"}.items():
    os.environ.setdefault(_name, _value)
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
        systems = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
        shown = [command, *(action.choices["slurm"] for action in systems)]  # of `template`, one of many
        pages += [f"## {name}", ""]
        for parser in shown:
            pages += ["```text", parser.format_help().rstrip(), "```", ""]
    page = Path(app.srcdir) / "reference" / "commands.md"
    text = "\n".join(pages)
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _fences_to_directives, priority=100)  # before napoleon
    app.connect("builder-inited", _write_help, priority=100)
