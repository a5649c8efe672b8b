"""Plans whose tensors each come from one rank: all ranks get the same bits, on any shape of nodes."""

import numpy as np
import pytest
from in_process import DTYPES, NODES, as_bytes, run

COUNTS = [1, 7, 0, 300, 300_001, 64, 5, 40_003, 2]


def bits_of(tensor, step, dtype, count):
    """Any bits at all but those of NaN, negative zeros among them."""
    rng = np.random.default_rng([tensor, step])
    values = (rng.integers(-50, 50, count) if "int" in dtype else rng.standard_normal(count)).astype(DTYPES[dtype])
    values[::3] = 0
    values[::6] *= -1
    return values


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())
def test_all_ranks_get_what_one_gives(nodes):
    dtypes = ["float32"] * 5 + ["float64", "int64", "float16", "bfloat16"]
    givers = [i * 7 % len(nodes) for i in range(len(COUNTS))]

    def work(team, rank):
        specs = [(f"t{i}", dtype, n) for i, (n, dtype) in enumerate(zip(COUNTS, dtypes, strict=True))]
        plan = team.plan("test", specs, "sum", False, givers=givers)
        steps = []
        for step in range(3):
            arrays = [
                bits_of(i, step, d, n) if givers[i] == rank else np.full(n, 77).astype(DTYPES[d])
                for i, (n, d) in enumerate(zip(COUNTS, dtypes, strict=True))
            ]
            for i, array in enumerate(arrays):
                plan.start(i, as_bytes(array))
            plan.wait_all()
            steps.append(arrays)
        return steps

    for steps in run(nodes, work):
        for step, arrays in enumerate(steps):
            for i, array in enumerate(arrays):
                assert array.tobytes() == bits_of(i, step, dtypes[i], COUNTS[i]).tobytes()


def test_ranks_that_disagree_on_who_gives_are_told():
    def work(team, rank):
        with pytest.raises(Exception, match="from rank"):
            team.plan("test", [("t", "float32", 3)], "sum", False, givers=[rank])

    run([0, 0], work)


def test_only_sums_that_are_sent_as_they_are():
    def work(team, rank):
        for options in ({"op": "mean"}, {"wire_dtype": "float16"}, {"in_segment": True}, {"givers": [2]}):
            arguments = {"op": "sum", "weighted": False, "givers": [0]} | options
            with pytest.raises(Exception, match=r"Expected a sum|a rank of the team"):
                team.plan("test", [("t", "float32", 3)], **arguments)

    run([0, 0], work)
