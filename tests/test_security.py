"""Nothing of ours executes what it reads: neither from disk nor from other ranks. check_security.py has the rest."""

import ast

import pytest
from launch import ROOT

SOURCES = sorted((ROOT / "keras_hpc").rglob("*.py"))
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "socket", "socketserver"}
# mpi4py's methods for Python objects, which it pickles. Those for buffers begin with a capital letter.
PICKLING = {
    *("send", "bsend", "ssend", "isend", "recv", "irecv", "sendrecv", "mrecv", "improbe", "mprobe"),
    *("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan"),
}


def _calls(source):
    """Of each call in a source: its line, what it is called on, as it is written, and its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.lineno, ast.unparse(node.func.value), node.func.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.lineno, "", node.func.id


def _unsafe(source):
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"line {node.lineno}: import {name}" for name in modules if name.split(".")[0] in UNSAFE_MODULES]
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append(f"line {node.value.lineno}: allow_pickle")
    for line, owner, name in _calls(source):
        is_communicator = "comm" in owner.lower().rpartition(".")[2]
        unsafe = (name in PICKLING and is_communicator) or (name in ("eval", "exec") and not owner)
        unsafe |= (owner, name) in {("torch", "load"), ("os", "system")}
        if unsafe:
            found.append(f"line {line}: {owner}.{name}()")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_pickle_and_no_socket(path):
    assert _unsafe(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from socket import create_server",
        "job.comm.bcast(x)",
        "self._comm.allgather([1])",
        "np.load(file, allow_pickle=True)",
        "torch.load(file)",
        "eval(text)",
    ],
)
def test_the_test_finds_them(source):
    assert _unsafe(source)
