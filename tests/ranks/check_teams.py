# SPDX-License-Identifier: Apache-2.0
"""Two models on two teams reduce at the same time, and tell what it cost: read from the trace of a real training."""

import itertools
import json
import logging
import pathlib
import signal
import threading
import time
import types

import keras
import numpy as np
import pytest
from keras_cases import enough, enough_on, job

import keras_hpc
from keras_hpc import _native, errors
from keras_hpc.job import trace

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,)}
FEATURES = 300

is_jax = keras.backend.backend() == "jax"


@pytest.fixture(params=[1] if is_jax else [*enough([0]), 1], ids=lambda threads: f"{threads} threads")
def team_job(request):
    keras_hpc.init(teams=2, threads_per_team=request.param)
    yield
    keras_hpc.finalize()


def model_on(team, name):
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(FEATURES, name=name)], name=name)
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    keras_hpc.assign_team(model, team)
    return model


def step(model):
    x = np.random.default_rng(keras_hpc.rank()).normal(size=(4, FEATURES)).astype(np.float32)
    model.train_on_batch(x, x)


def traced(work):
    _native.set_tracing(True)
    work()
    _native.set_tracing(False)
    return sorted(json.loads(_native.take_trace()), key=lambda event: event[3])  # name, kind, team, begin, end


@enough_on("torch")
def test_pipelined_teams_are_on_their_way_at_the_same_time(team_job):
    for team in (0, 1):
        keras_hpc.configure_team(team, schedule="pipelined")
    models = [model_on(0, "first"), model_on(1, "second")]
    for model in models:
        step(model)

    def work():
        for _ in range(3):
            for model in models:
                step(model)

    events = traced(work)
    starts = [(team, begin) for name, kind, team, begin, _ in events if kind == "start" and "kernel" in name]
    waits = [(team, end) for name, kind, team, _, end in events if kind == "wait"]
    assert [team for team, _ in starts] == [0, 1] * 3
    # Between a team's start and the wait for what it started, the other team starts.
    for team, begin in starts[:-2]:
        following = [e for t, e in waits if t == team and e > begin]
        other = [b for t, b in starts if t != team and b > begin]
        assert other[0] < following[0]
    for model in models:
        model.evaluate(np.zeros((4, FEATURES), np.float32), np.zeros((4, FEATURES), np.float32), verbose=0)
        keras_hpc.check_replicas(model, team=models.index(model))


@pytest.mark.skipif(is_jax, reason="XLA runs one program at a time on a CPU")
@enough_on("torch")
def test_a_team_that_waits_does_not_hold_up_the_other(team_job):
    models = [model_on(0, "first"), model_on(1, "second")]
    for model in models:
        step(model)  # traced and compiled, in order
    steps, pause = 20, 0.5
    ends = {}

    def train(model, count, late):
        if late:
            time.sleep(pause)
        for _ in range(count):
            step(model)
        ends[model.name] = time.monotonic()

    def work():
        # One rank is late for the first team: the other waits there, while the second team goes on.
        late = keras_hpc.rank() == 1
        threads = [
            threading.Thread(target=train, args=(models[0], 1, late)),
            threading.Thread(target=train, args=(models[1], steps, False)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    events = traced(work)
    if keras_hpc.rank() == 0:
        waits = [(b, e) for _, kind, team, b, e in events if kind == "wait" and team == 0 and e - b > pause / 2]
        begin, end = waits[0]
        inside = [1 for _, kind, team, b, e in events if team == 1 and kind == "start" and begin < b < end]
        assert len(inside) >= 5
    names = [{name for name, kind, t, *_ in events if t == team and ": " in name} for team in (0, 1)]
    assert all(names)
    for model in models:
        keras_hpc.check_replicas(model, team=models.index(model))


@enough_on("torch")
def test_reports(team_job, caplog):
    keras_hpc.configure_team(0, report_every=4)
    model = model_on(0, "first")
    x = np.zeros((64, FEATURES), np.float32)
    with caplog.at_level(logging.INFO, "keras_hpc"):
        history = model.fit(
            x, x, batch_size=4, epochs=2, verbose=0, callbacks=[keras_hpc.callbacks.CommunicationReport()]
        ).history
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("team 0, steps ")]
    if keras_hpc.rank() == 0:
        assert len(lines) >= (2 if is_jax else 4)  # JAX computes behind the script's back
        assert lines[0].startswith("team 0, steps 1 to ")
        assert all("0.36 MB a step" in line for line in lines)
        assert "GB/s" in lines[0]
        assert lines[0].endswith("shared memory")
    else:
        assert not lines
    assert history["communication/team0_mb"] == [pytest.approx(4 * (FEATURES + 1) * FEATURES / 1e6, rel=1e-4)] * 2
    for milliseconds, exposed, hidden in zip(
        history["communication/team0_ms"],
        history["communication/team0_exposed_ms"],
        history["communication/team0_hidden"],
        strict=True,
    ):
        assert milliseconds > 0
        assert exposed >= 0
        assert 0 <= hidden <= 1
    assert not any("team1" in name for name in history)


def test_trace_shows_communication_beside_the_steps(tmp_path):
    path = tmp_path / "trace.json"
    keras_hpc.init(teams=2, trace=str(path))
    step(model_on(1, "second"))
    x = np.zeros((16, FEATURES), np.float32)
    model_on(0, "first").fit(x, x, batch_size=4, verbose=0)
    first = keras_hpc.rank() == 0
    keras_hpc.finalize()
    assert path.exists() == first
    if not first:
        return
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    started = {(e["args"]["kind"], e["name"]) for e in events if e["ph"] == "X"}
    assert {plan["team"] for plan in content["otherData"]["plans"]} == {0, 1}
    for plan in content["otherData"]["plans"]:
        assert {("start", tensor["name"]) for tensor in plan["tensors"]} <= started
        assert FEATURES**2 in [tensor["elements"] for tensor in plan["tensors"]]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ended_in_rows = [((e["pid"], e["tid"]), e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    assert not (tmp_path / "trace.json.parts").exists(), "they are in the file"
    assert {(rank, name.partition(",")[0]) for (rank, _), name in rows.items()} == {
        (rank, row)
        for rank in (0, 1)
        for row in ("steps", *(f"team {t} {what}" for t in (0, 1) for what in ("start and wait", "communication")))
    }
    for _, same_row in itertools.groupby(sorted(ended_in_rows), key=lambda event: event[0]):
        times = [time for _, *both in same_row for time in both]
        assert times == sorted(times), "events of one row do not overlap"
    for rank in (0, 1):
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        steps = [e for e in mine if rows[rank, e["tid"]] == "steps"]
        assert [e["name"] for e in steps] == ["second train", *["first train"] * 2]
        starts = [e for e in mine if e["cat"] == "start" and "kernel" in e["name"]]
        assert [rows[rank, e["tid"]].partition(",")[0] for e in starts] == [
            "team 1 start and wait",
            *["team 0 start and wait"] * 2,
        ]
        if not is_jax:  # whose steps run behind the script's back
            for outer, inner in zip(steps, starts, strict=True):
                assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_teams_are_apart(team_job):
    assert job().teams[0].native.id != job().teams[1].native.id
    with pytest.raises(ValueError, match="Received: team=2"):
        model_on(2, "third")


def recorded(path):
    """The names of the steps in a file, of each rank."""
    events = json.loads(path.read_text())["traceEvents"]
    return [[e["name"] for e in events if e["pid"] == rank and e.get("cat") == "step"] for rank in (0, 1)]


def of_all(tmp_path):
    """A folder that all ranks share."""
    return pathlib.Path(keras_hpc.broadcast_object(str(tmp_path)))


@enough_on("torch")
def test_tensorboard_shows_what_communication_cost(tmp_path):
    pytest.importorskip("tensorboard")
    tensorflow = pytest.importorskip("tensorflow")
    keras_hpc.init()
    x = np.zeros((40, FEATURES), np.float32)
    report, board = keras_hpc.callbacks.CommunicationReport(), keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    history = model_on(0, "shown").fit(x, x, batch_size=4, epochs=2, verbose=0, callbacks=[report, board]).history
    first = keras_hpc.rank() == 0
    keras_hpc.finalize()
    files = list((tmp_path / "train").glob("events.*"))
    assert len(files) == first, "rank 0 writes"
    shown = {}
    for record in tensorflow.data.TFRecordDataset(list(map(str, files))):
        for value in tensorflow.compat.v1.Event.FromString(record.numpy()).summary.value:
            shown.setdefault(value.tag, []).append(float(tensorflow.make_ndarray(value.tensor)))
    for name in (name for name in history if name.startswith("communication/") and first):
        assert shown[f"epoch_{name}"] == pytest.approx(history[name], rel=1e-6)
    assert not first or "epoch_communication/team0_ms" in shown


@enough_on("torch")
def test_a_callback_chooses_the_steps_that_are_recorded(tmp_path):
    keras_hpc.init()
    path = of_all(tmp_path) / "trace.json"
    keras_hpc.finalize()
    keras_hpc.init(trace=str(path), trace_from="demand")
    x = np.zeros((40, FEATURES), np.float32)
    model = model_on(0, "chosen")
    step(model)
    model.fit(x, x, batch_size=4, epochs=3, verbose=0, callbacks=[keras_hpc.callbacks.Trace(first_step=7, steps=4)])
    first = keras_hpc.rank() == 0
    keras_hpc.finalize()
    if first:
        assert recorded(path) == [["chosen train"] * 4] * 2


def test_a_callback_records_whole_executions_of_several_steps(monkeypatch):
    said = []
    monkeypatch.setattr(trace, "recording", lambda: types.SimpleNamespace(record=said.append))
    callback = keras_hpc.callbacks.Trace(first_step=13, steps=5)
    callback.on_train_begin()
    recorded = []
    for begin in range(0, 50, 10):  # steps_per_execution=10
        callback.on_train_batch_begin(begin)
        recorded += [begin] if said == [True] else []
        callback.on_train_batch_end(begin + 9)
    assert recorded == [20]
    assert said == [True, False]


@enough_on("torch")
def test_a_signal_or_a_file_begins_and_ends_recording(tmp_path):
    keras_hpc.init()
    path = of_all(tmp_path) / "trace.json"
    keras_hpc.finalize()
    keras_hpc.init(trace=str(path), trace_from="demand")
    recording = trace.recording()
    model, rank = model_on(0, "asked"), keras_hpc.rank()

    def seen(on):
        deadline = time.monotonic() + 30
        while recording.is_on != on and time.monotonic() < deadline:
            time.sleep(0.01)
        assert recording.is_on == on
        step(model)
        keras_hpc.barrier()

    seen(False)
    signal.raise_signal(signal.SIGUSR2) if rank == 1 else None
    seen(rank == 1)
    signal.raise_signal(signal.SIGUSR2) if rank == 1 else None
    seen(False)
    switch = recording.folder / "record"
    switch.touch() if rank == 0 else None
    seen(True)
    switch.unlink() if rank == 0 else None
    seen(False)
    keras_hpc.finalize()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    if rank == 0:
        assert recorded(path) == [["asked train"], ["asked train"] * 2]


@enough_on("torch")
def test_a_trace_that_cannot_be_written_on_one_rank_is_refused_on_all(tmp_path):
    keras_hpc.init()
    rank = keras_hpc.rank()
    keras_hpc.finalize()
    (tmp_path / "file").write_text("")
    path = tmp_path / ("file/trace.json" if rank else "trace.json")
    with pytest.raises(OSError if rank else errors.LaunchError, match="file" if rank else "refused on rank 1"):
        keras_hpc.init(trace=str(path))
    assert not keras_hpc.is_initialized()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@enough_on("torch")
def test_clocks_of_nodes_are_compared(monkeypatch):
    """Ranks of one machine have one clock: one of them shifted here by a minute."""
    keras_hpc.init()
    rank = keras_hpc.rank()
    monkeypatch.setattr(job(), "node_count", 2)
    if rank == 1:
        monkeypatch.setattr(time, "monotonic", lambda was=time.monotonic: was() - 60)
    offset = trace._offset(job())
    monkeypatch.undo()
    keras_hpc.finalize()
    assert offset == (pytest.approx(60, abs=0.05) if rank else 0)
