"""What ranks have recorded, put together: of jobs that were killed, too."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from keras_hpc.job import trace_file
from keras_hpc.tools import timeline

KILLED = """
import os, signal, sys, time
import keras, numpy as np, keras_hpc
keras_hpc.init(trace=sys.argv[1])
x = np.zeros((64, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)], name="killed")
model.compile("sgd", "mse")
begin = time.monotonic()
while keras_hpc.broadcast_object(time.monotonic() - begin) < 2:
    model.fit(x, x, batch_size=4, verbose=0)
if keras_hpc.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
keras_hpc.barrier()
"""


def _rank(folder, rank, lines, cut=0):
    folder.mkdir(parents=True, exist_ok=True)
    path = trace_file.part(folder, rank)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for line in [{"rank": rank, "ranks": 2, "host": "node", "offset": 10.0 * rank}, *lines]:
        trace_file.append(descriptor, line)
    os.close(descriptor)
    os.truncate(path, path.stat().st_size - cut)


def _merge(*words):
    return subprocess.run(
        [sys.executable, "-m", "keras_hpc", "trace", *map(str, words)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("cut", "left"), [(0, 3), (1, 3), (30, 2)])  # of the last byte, only a check sum is missed
def test_what_was_written_before_a_kill_is_read(tmp_path, cut, left):
    steps = [{"steps": [["m train", at, at + 0.5]], "events": [["k/0", "reduce", 0, at, at + 0.1]]} for at in (1, 2, 3)]
    _rank(tmp_path, 0, steps)
    _rank(tmp_path, 1, steps, cut)
    assert trace_file.merge(tmp_path, tmp_path / "out.json") == 2
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    found = [[e["ts"] for e in events if e["pid"] == rank and e.get("cat") == "step"] for rank in (0, 1)]
    assert found == [[1e6, 2e6, 3e6], [11e6, 12e6, 13e6][:left]], "by the clock of rank 0"


def test_overlapping_events_have_rows_of_their_own(tmp_path):
    events = [["a", "network", 0, 0, 3], ["b", "network", 0, 1, 4], ["c", "network", 0, 3, 5], ["d", "wait", 0, 2, 4]]
    _rank(tmp_path, 0, [{"steps": [], "events": events}])
    trace_file.merge(tmp_path, tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert {e["name"]: rows[e["tid"]] for e in found if e["ph"] == "X"} == {
        "a": "team 0 communication",
        "b": "team 0 communication, 2",
        "c": "team 0 communication",
        "d": "team 0 start and wait",
    }


def test_the_newest_of_several_jobs(tmp_path):
    for name in ("20260101-000000-1", "20260102-000000-1"):
        _rank(tmp_path / name, 0, [])
    done = _merge(tmp_path, "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    assert "of 2 jobs the newest, 20260102-000000-1; others: 20260101-000000-1" in done.stdout
    assert (tmp_path / "out.json").exists()


def test_a_folder_without_a_trace_is_refused(tmp_path):
    done = _merge(tmp_path, "--out", tmp_path / "out.json")
    assert done.returncode == 1
    assert f"Received: {tmp_path}" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.mpi
def test_a_job_that_was_killed_leaves_a_trace(tmp_path, run_ranks):
    (tmp_path / "train.py").write_text(KILLED)
    path = tmp_path / "trace.json.gz"
    run_ranks(2, [tmp_path / "train.py", path], backend="torch", expect_failure=True)
    assert not path.exists()
    done = _merge(f"{path}.parts", "--out", path)
    assert done.returncode == 0, done.stderr
    content = json.loads(gzip.decompress(path.read_bytes()))
    steps = [[e for e in content["traceEvents"] if e["pid"] == rank and e.get("cat") == "step"] for rank in (0, 1)]
    assert [len(events) > 10 for events in steps] == [True, True]
    assert {event["name"] for events in steps for event in events} == {"killed train"}
    assert len(timeline.read(path).elements) == len(content["otherData"]["plans"][0]["tensors"]) == 3
