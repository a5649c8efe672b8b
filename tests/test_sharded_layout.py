"""Who updates what of sharded variables: arithmetic, compared with NumPy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_hpc.keras_hooks.sharded.layout import deal

SHAPES = st.lists(
    st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.tuples(st.integers(1, 9000), st.integers(1, 40)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=300)
@given(shapes=SHAPES, ranks=st.integers(1, 9), cut=st.booleans())
def test_each_element_has_one_rank(shapes, ranks, cut):
    for shape, pieces in zip(shapes, deal(shapes, ranks, cut=cut), strict=True):
        elements = np.arange(math.prod(shape))
        found = [elements[piece.start : piece.stop].reshape(piece.shape) for piece in pieces]
        np.testing.assert_array_equal(np.concatenate([part.reshape(-1) for part in found]), elements)
        assert [piece.rank for piece in pieces] == sorted({piece.rank for piece in pieces})
        assert len(pieces) == 1 or (cut and all(piece.start % 32 == 0 for piece in pieces))
        for piece in pieces:
            assert 0 <= piece.rank < ranks
            if len(pieces) > 1 and len(piece.shape) > 1:  # whole rows
                assert piece.shape[1:] == shape[1:]
                assert piece.start % math.prod(shape[1:]) == 0


@settings(deadline=None, max_examples=300)
@given(shapes=SHAPES, ranks=st.integers(1, 9))
def test_shares_are_equal(shapes, ranks):
    shares = np.zeros(ranks)
    for pieces in deal(shapes, ranks, cut=True):
        for piece in pieces:
            shares[piece.rank] += piece.stop - piece.start
    assert np.abs(shares - shares.mean()).max() <= max(33, 0.02 * shares.mean())


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (2, [[(0, (1000, 64))], [(0, (64,))], [(1, (1000, 64))], [(1, (64,))]]),
        (3, [[(0, (667, 64)), (1, (333, 64))], [(1, (64,))], [(1, (334, 64)), (2, (666, 64))], [(2, (64,))]]),
    ],
)
def test_a_network(ranks, expected):
    found = deal([(1000, 64), (64,), (1000, 64), (64,)], ranks, cut=True)
    assert [[(piece.rank, piece.shape) for piece in pieces] for pieces in found] == expected


def test_whole_variables_go_to_whoever_has_the_least():
    found = deal([(2,), (7, 1), (3, 2), (4,), ()], 2, cut=False)
    assert [pieces[0].rank for pieces in found] == [0, 0, 1, 1, 0]
    assert found[1][0].shape == (7, 1)
