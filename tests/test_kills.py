"""Ranks that are killed from outside, at any moment: the others go on, and end with the bits of a job left alone."""

import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from kills import TRAIN, elastic, killer

pytestmark = pytest.mark.mpi

_BEGINS = r"steps an epoch; \d rank"


@pytest.fixture
def memory():
    """A folder in memory: it outlives every process of its node."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="keras_hpc-tests-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.soak
def test_two_kills_of_three_ranks(memory, run_ranks):
    """One while it trains, and one while the others start again."""
    source = random.Random()
    story = elastic(
        3,
        TRAIN,
        memory / "job",
        5,
        0.02,
        backend="torch",
        meddle=killer([(_BEGINS, source.uniform(0.3, 1)), ("starts again", source.uniform(0.2, 3))], source),
    )
    assert len(story.killed) == 2, story.text
    assert len(story.when("starts again with 2")) == len(story.when("starts again with 1")) == 1, story.text
    alone = run_ranks(1, [TRAIN], backend="torch").output
    assert len(story.digests) == 1, story.text
    assert story.digests.pop() in alone


@pytest.mark.soak
@pytest.mark.parametrize(("backend", "kills"), [("jax", 7), ("torch", 7), ("tensorflow", 6)])
def test_twenty_kills_of_one_of_four_ranks(backend, kills, memory):
    """At a moment of the whole time from start to end, each equally likely; a checkpoint in memory every fifth step."""
    source = random.Random()
    whole = elastic(4, TRAIN, memory / "whole", 5, backend=backend)
    (expected,) = whole.digests
    length = whole.lines[-1][0]
    for number in range(kills):
        story = whole
        while not story.killed:  # a job that had ended before its moment shows nothing
            moment, folder = length * source.random(), memory / f"{number} {source.random()}"
            story = elastic(4, TRAIN, folder, 5, backend=backend, meddle=killer([moment], source))
            assert story.digests == {expected}, story.text
        assert len(story.killed) == 1, story.text
        assert len(story.when("starts again with 3")) == 1, story.text
        (killed,), again = story.killed, story.when(_BEGINS)[-1]
        sys.stdout.write(
            f"{backend}: killed after {killed:.1f} s of {length:.1f}, trained again {again - killed:.1f} s later\n"
        )
        assert again - killed < 15
