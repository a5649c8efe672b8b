# SPDX-License-Identifier: Apache-2.0
"""Two models on two teams reduce at the same time, and tell what it cost: read from the trace of a real training."""

import json
import logging
import threading
import time

import keras
import numpy as np
import pytest
from keras_cases import job

import keras_hpc
from keras_hpc import _native

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
FEATURES = 300

is_jax = keras.backend.backend() == "jax"


@pytest.fixture(params=[1] if is_jax else [0, 1], ids=lambda threads: f"{threads} threads")
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
    return sorted(_native.take_trace(), key=lambda event: event[3])  # name, kind, team, begin, end


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
    assert {(rank, name) for (rank, _), name in rows.items()} == {
        (rank, row)
        for rank in (0, 1)
        for row in ("steps", *(f"team {t} {what}" for t in (0, 1) for what in ("start and wait", "communication")))
    }
    for rank in (0, 1):
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        steps = [e for e in mine if rows[rank, e["tid"]] == "steps"]
        assert [e["name"] for e in steps] == ["second train", *["first train"] * 2]
        starts = [e for e in mine if e["cat"] == "start" and "kernel" in e["name"]]
        assert [rows[rank, e["tid"]] for e in starts] == ["team 1 start and wait", *["team 0 start and wait"] * 2]
        if not is_jax:  # whose steps run behind the script's back
            for outer, inner in zip(steps, starts, strict=True):
                assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_teams_are_apart(team_job):
    assert job().teams[0].native.id != job().teams[1].native.id
    with pytest.raises(ValueError, match="Received: team=2"):
        model_on(2, "third")
