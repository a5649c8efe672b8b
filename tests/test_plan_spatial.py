"""`python -m keras_hpc plan --spatial`: its sum by hand, and of a real model."""

import re
import subprocess
import sys

import pytest
from launch import child_environment

from keras_hpc.tools import plan_spatial

MODEL = """
import keras

def network():
    inputs = keras.Input((32, 12, 3))
    x = keras.layers.Conv2D(4, 5, strides=2, padding="same", use_bias=False)(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return keras.Model(inputs, keras.layers.Conv2D(2, 3, padding="same")(x))
"""
BY_HAND = """
from keras_hpc.tools import plan_spatial
from network import network

seen = []

def seconds_of(of, shapes, needs_gradient):
    node = of[0]
    seen.append((type(node.operation).__name__, *shapes, needs_gradient))
    return 1e-6 * shapes[0][1] * shapes[0][2]

costs = plan_spatial.Costs(1e-3, 1e6, 1e7, lambda nbytes: 0.5)
splits = plan_spatial.evaluate(network(), 4, 2, costs, seconds_of)
assert [(s.groups, s.parts) for s in splits] == [(4, 1), (2, 2), (1, 4)], splits
whole, half, quarter = splits

# Without parts: layers, and what backward does not hide of the reduction.
layers = 1e-6 * (32 * 12 + 2 * 16 * 6 + 16 * 6)
assert abs(whole.compute_s - layers) < 1e-12
assert abs(whole.step_s - (layers + 0.5 - 2 / 3 * layers)) < 1e-9
assert whole.halo_bytes == 0

# In two parts: the second one reads 1 row of the first one, its own 16 and 2 of padding; the first one 2 of the second.
assert seen[4] == ("Conv2D", (2, 17 + 2, 15, 3), False), seen[4]
assert seen[5] == ("BatchNormalization", (2, 8, 6, 4), True)
assert seen[7] == ("Conv2D", (2, 10, 8, 4), True)
first = 2 * 2 * 12 * 3 * 4  # samples, rows, columns, channels, bytes: of the rank that receives most
second = 2 * 1 * 6 * 4 * 4
assert half.halo_bytes == first + 2 * second, half  # nobody wants the gradient of the image
compute = 1e-6 * (19 * 15 + 2 * 8 * 6 + 10 * 8)
windows = 2 * 19 * 15 * 3 * 4 + 2 * (2 * 10 * 8 * 4 * 4)
exchange = 3 * 2e-3 + (first + 2 * second) / 1e6 + windows / 1e7 + 4e-3
step = compute + exchange
assert abs(half.compute_s - compute) < 1e-12
assert abs(half.step_s - (step + 0.5 - 2 / 3 * step)) < 1e-9, (half.step_s, step)
assert plan_spatial.best(splits) is whole
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "network.py").write_text(MODEL)
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    return tmp_path


def run(folder, *words):
    command = [sys.executable, *words]
    env = child_environment("torch")
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_the_sum_by_hand_and_of_a_real_model(folder):
    done = run(folder, "by_hand.py")
    assert done.returncode == 0, done.stderr
    words = ("-m", "keras_hpc", "plan", "--ranks", "2", "--nodes", "1", "--batch-size", "2")
    done = run(folder, *words, "--spatial", "network.py:network")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(\d) x (\d) +([\d.e+-]+) ms +([\d.e+-]+) ms +([\d.e+-]+) MB", done.stdout, re.M)
    assert [line[:2] for line in lines] == [("2", "1"), ("1", "2")]
    assert all(0 < float(layers) <= float(step) for *_, step, layers, _ in lines)
    assert float(lines[0][4]) == 0
    assert float(lines[1][4]) > 0
    assert done.stdout.count("best") == 1


@pytest.mark.parametrize("given", ["model.py", "missing.py:network", "model.py:nothing"])
def test_what_is_no_model_is_refused(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("network = 1")
    with pytest.raises(SystemExit, match=r"Expected FILE.py:FUNCTION. Received: "):
        plan_spatial.model_of(given)
