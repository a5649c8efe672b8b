"""What ranks have recorded, put together: of jobs that were killed, too."""

import gzip
import json
import os
import re
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

PROFILED = """
import contextlib, sys, time
import keras, numpy as np, keras_hpc
path, profile = sys.argv[1:]
keras_hpc.init(trace=path)
backend = keras.backend.backend()
if backend == "torch":
    import torch
    annotation, profiler = torch.profiler.record_function, torch.profiler.profile()
elif backend == "jax":
    import jax
    annotation, profiler = jax.profiler.TraceAnnotation, jax.profiler.trace(profile)
else:
    import tensorflow as tf
    annotation, profiler = tf.profiler.experimental.Trace, tf.profiler.experimental.Profile(profile)

class Probe(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        with annotation(f"probe {time.monotonic():.9f}"):
            time.sleep(0.001)

x = np.zeros((64, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)], name="profiled")
model.compile("sgd", "mse")
model.fit(x, x, batch_size=8, verbose=0)
with profiler if keras_hpc.rank() == 1 else contextlib.nullcontext():
    model.fit(x, x, batch_size=8, verbose=0, callbacks=[Probe()])
if keras_hpc.rank() == 1 and backend == "torch":
    profiler.export_chrome_trace(profile + ".json")
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


@pytest.mark.mpi
@pytest.mark.parametrize(
    "backend", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("tensorflow", "jax")), "torch"]
)
def test_a_profile_of_the_framework_stands_at_the_time_of_the_steps(backend, tmp_path, run_ranks):
    (tmp_path / "train.py").write_text(PROFILED)
    path, profile = tmp_path / "trace.json", tmp_path / "profile"
    run_ranks(2, [tmp_path / "train.py", path, profile], backend=backend)
    done = _merge(path, "--profile", f"{profile}.json" if backend == "torch" else profile)
    assert done.returncode == 0, done.stderr
    assert re.search(r": \d+ events of rank 1$", done.stdout, re.M), done.stdout
    events = json.loads((tmp_path / "trace-with-profile.json").read_text())["traceEvents"]
    probes = [event for event in events if event["name"].startswith("probe ") and event["ph"] == "X"]
    assert len(probes) == 4  # of rank 1 alone: 64 samples, two ranks
    for event in probes:
        assert event["ts"] == pytest.approx(float(event["name"].split()[1]) * 1e6, abs=500), "us, by the ranks' clock"
        assert event["dur"] >= 1000
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {names[event["pid"]].partition(":")[0] for event in probes} == {"rank 1"}
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "step" and e["pid"] == 1]
    others = [e for e in events if e["pid"] == probes[0]["pid"] and e["ph"] == "X"]
    assert len(steps) == 8
    for begin, end in steps[4:]:
        assert any(begin <= e["ts"] and e["ts"] + e["dur"] <= end for e in others), "what the framework does in a step"
    assert not [event for event in events if trace_file.MARK.search(event["name"])]
    if backend == "tensorflow":
        (file,) = profile.rglob("*.xplane.pb")
        one, other = (_events(file, without) for without in ("none", "jax.profiler"))
        assert [event["name"] for event in one] == [event["name"] for event in other]
        assert [event.get("ts", 0) for event in one] == pytest.approx([e.get("ts", 0) for e in other], abs=1)


def _events(file, without):
    """Those of a profile, read where a module is not there: JAX reads them, else TensorFlow."""
    code = f"""
import json, sys
from pathlib import Path
sys.modules[{without!r}] = None
from keras_hpc.tools import profiles
print(json.dumps(profiles.events(Path({str(file)!r}))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])[1]


def test_a_profile_without_steps_is_refused(tmp_path):
    _rank(tmp_path / "parts", 0, [])
    (tmp_path / "profile.json").write_text('{"traceEvents": [{"name": "op", "ph": "X", "ts": 1, "dur": 1, "pid": 0}]}')
    (tmp_path / "bad.json").write_text("[")
    for profile, said in (
        ("profile.json", "0 steps are marked"),
        ("nothing", "Expected a profile"),
        ("bad.json", "Chrome's format"),
    ):
        done = _merge(tmp_path / "parts", "--profile", tmp_path / profile, "--out", tmp_path / "out.json")
        assert done.returncode == 1
        assert said in done.stderr
    assert "--profile says what to add" in _merge(tmp_path / "out.json").stderr
