# SPDX-License-Identifier: Apache-2.0
"""Imports of the package go one way, without a circle, and Keras' private names stand in one file."""

import ast
from pathlib import Path

import pytest
from launch import ROOT

PACKAGE = ROOT / "keras_hpc"
# Who may import whom: each only what stands above it. Files and folders of the package.
LEVELS = [
    ["errors"],
    ["job"],
    ["backends", "callbacks", "data", "optimizers", "schedules"],
    ["spatial"],
    ["keras_hooks"],
    ["api"],
    ["__init__"],
    ["tools"],
    ["__main__"],
]
FILES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}


def imports(path):
    """The files of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] != "keras_hpc" or parts[1:2] == ["_native"]:
                continue
            for end in range(len(parts), 0, -1):  # the longest that is a file
                candidate = "/".join(parts[1:end])
                if candidate in FILES or f"{candidate}/__init__" in FILES or (candidate == "" and end == 1):
                    found.add(candidate if candidate in FILES else f"{candidate}/__init__".lstrip("/"))
                    break
    return found - {path.relative_to(PACKAGE).with_suffix("").as_posix()}


GRAPH = {name: imports(path) for name, path in FILES.items()}


def level(name):
    top = name.split("/")[0]
    (found,) = [number for number, names in enumerate(LEVELS) if top in names]
    return found


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_go_one_way(name):
    upward = [other for other in GRAPH[name] if level(other) > level(name)]
    assert not upward, f"{name} imports {upward}, which stand above it"


def test_no_circle():
    done, path = set(), []

    def visit(name):
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name in done:
            return
        path.append(name)
        for other in sorted(GRAPH[name]):
            visit(other)
        path.pop()
        done.add(name)

    for name in sorted(FILES):
        visit(name)


def test_private_names_of_keras_stand_in_one_file():
    others = [name for name, path in FILES.items() if "keras.src" in path.read_text()]
    assert others == ["keras_hooks/keras_private"]


def test_the_graph_is_not_empty():
    assert "keras_hooks/fit" in GRAPH
    assert "job/current" in GRAPH["keras_hooks/fit"], "the imports are read"
    assert Path(PACKAGE, "job").is_dir()
