"""What ranges of rows or samples have in common that together are everything."""

import itertools


def assert_even(parts, count):
    """They follow each other from 0 to `count`, and differ by one in size at most."""
    assert parts[0][0] == 0
    assert parts[-1][1] == count
    assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 1
