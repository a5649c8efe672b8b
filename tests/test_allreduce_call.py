"""Allreduce of one array by a call: every path, 1 to 16 ranks as threads, any shape of nodes, against NumPy."""

import itertools

import numpy as np
import pytest
from in_process import DTYPES, NODES, as_bytes, check, data_of, few_nodes, run, soak

from keras_hpc import _native


@pytest.mark.parametrize("name", [*few_nodes(), *soak("11 x 1")])
@pytest.mark.parametrize("path", ["slot", "staged", "push", ""])
def test_every_path_of_a_call_equals_numpy(name, path):
    nodes = NODES.get(name, list(range(11)))
    p = len(nodes)
    if path == "slot" and len(set(nodes)) > 8:
        return

    cases = [
        (dtype, count, op)
        for dtype, count in itertools.product(DTYPES, (0, 1, p - 1, p, p + 1, 1001, 8191))
        for op in ("sum", "min", "max", "mean")
        if op != "mean" or "int" not in dtype
    ]

    def work(team, rank):
        space = team.empty(8 * 8200)
        results = []
        for dtype, count, op in cases:
            x = data_of(rank, [count], [dtype])[0]
            if path == "push":  # some way into an array
                x = space.view(x.dtype)[3 : 3 + count]
                x[:] = data_of(rank, [count], [dtype])[0]
            team.allreduce(as_bytes(x), dtype, op, path)
            results.append(x.copy())
        return results

    results = run(nodes, work, 0, timeout=60)
    for i, (dtype, count, op) in enumerate(cases):
        check([[r[i]] for r in results], nodes, [count], [dtype], op)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_on_one_node_the_way_does_not_change_a_bit(ranks):
    def work(team, rank):
        found = []
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            x = data_of(rank, [4099], [dtype])[0]
            shared = team.empty(x.nbytes).view(x.dtype)
            for op in ("sum", "mean"):
                results = []
                for path in ("slot", "staged", "push"):
                    array = shared if path == "push" else np.empty_like(x)
                    array[:] = x
                    team.allreduce(as_bytes(array), dtype, op, path)
                    results.append(array.tobytes())
                found.append(len(set(results)))
        return found

    for found in run([0] * ranks, work):
        assert found == [1] * 8


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 0], [0, 1], [0, 1, 0, 1, 1]], ids=str)
@pytest.mark.parametrize("path", ["staged", "push"])
def test_large_calls_in_a_row(nodes, path):
    def work(team, rank):
        for n in (300_000, 1_000_003, 131_072, 131_073):  # chunks of half a MiB, and one byte more
            x = team.empty(4 * n).view(np.float32)
            for step in range(3):
                x[:] = rank + step + np.arange(n) % 7
                team.allreduce(as_bytes(x), "float32", "sum", path)
                want = sum(r + step + np.arange(n) % 7 for r in range(len(nodes)))
                np.testing.assert_array_equal(x, want)
                team.allreduce(as_bytes(x[:5].copy()), "float32", "sum")  # another path in between

    run(nodes, work, 0, timeout=60)


def test_parts_of_a_shared_array_must_be_the_same_part():
    def work(team, rank):
        x = team.empty(4 * 10_000).view(np.float32)
        with pytest.raises(_native.PlanMismatchError, match="different parts"):
            team.allreduce(as_bytes(x[rank : 5_000 + rank]), "float32", "sum", "push")
        private = np.ones(5_000, np.float32)
        with pytest.raises(_native.PlanMismatchError, match=r"in memory of keras_hpc\.empty"):
            team.allreduce(as_bytes(private if rank else x[:5_000]), "float32", "sum", "staged" if rank else "push")

    run([0, 0], work)


def test_a_shared_array_outlives_its_team():
    x = run([0, 0], lambda team, rank: team.empty(4096))[0]
    x[:] = 7
    assert x.sum() == 7 * 4096


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 0, 1], [0, 1, 0, 1, 1], list(range(9))])
def test_ranks_that_disagree_are_told_and_go_on(nodes):
    calls = [(3, "float32", "sum"), (3, "float64", "sum"), (4, "float32", "sum"), (3, "float32", "max")]
    calls += [(300_000, "float32", "sum"), (300_001, "float32", "sum")]

    def work(team, rank):
        for usual in (calls[0], calls[4]):
            for odd_call in calls:
                for odd_rank in {0, len(nodes) - 1}:
                    count, dtype, op = odd_call if rank == odd_rank else usual
                    x = np.ones(count, dtype)
                    if odd_call == usual:
                        team.allreduce(as_bytes(x), dtype, op)
                        assert np.all(x == len(nodes))
                    else:
                        with pytest.raises(_native.PlanMismatchError, match="Ranks disagree on what to communicate"):
                            team.allreduce(as_bytes(x), dtype, op)

    run(nodes, work, timeout=30)
