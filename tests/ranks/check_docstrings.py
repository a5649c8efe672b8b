"""Numbers in docstrings of the API are what comes out, on two ranks."""

import doctest
import importlib

import numpy as np
import pytest

import keras_hpc

RANKS = {"torch": (2,)}
MODULES = ("api.collectives", "api.exchange", "api.loops", "api.parts", "schedules")


@pytest.fixture(scope="module", autouse=True)
def job():
    keras_hpc.init()
    yield
    keras_hpc.finalize()


def _examples():
    for name in MODULES:
        module = importlib.import_module(f"keras_hpc.{name}")
        for test in doctest.DocTestFinder(exclude_empty=True).find(module):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("test", _examples())
def test_example(test):
    test.globs |= {"keras_hpc": keras_hpc, "np": np, "rank": keras_hpc.rank(), "size": keras_hpc.size()}
    said = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    assert said == []


def test_every_collective_has_an_example():
    names = {test.values[0].name.rpartition(".")[2] for test in _examples()}
    assert {"allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast", "average", "shard"} <= names
