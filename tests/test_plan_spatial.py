"""`python -m keras_hpc plan --spatial`: what is rehearsed, its sum by hand, and of a real model."""

import re
import subprocess
import sys

import pytest
from launch import ROOT, child_environment, launch

from keras_hpc.tools import plan_spatial, rehearsal

SOAK = pytest.mark.soak
MODEL = """
import keras

def network(synchronized=False):
    inputs = keras.Input((32, 12, 3))
    x = keras.layers.Conv2D(4, 5, strides=2, padding="same", use_bias=False)(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(synchronized=synchronized)(x))
    return keras.Model(inputs, keras.layers.Conv2D(2, 3, padding="same")(x))

def in_a_job():  # only there PyTorch and JAX have it
    return network(synchronized=True)

def too_large():
    raise MemoryError("no memory for this")

def unbuilt():
    return keras.Sequential([keras.layers.Conv2D(3, 3)])

def few_rows():
    inputs = keras.Input((6, 12, 3))
    return keras.Model(inputs, keras.layers.Conv2D(2, 3, padding="same")(inputs))
"""
BY_HAND = """
import keras_hpc
from keras_hpc.job import current
from keras_hpc.tools.alone import standing_in
from keras_hpc.spatial.geometry import Grid
from keras_hpc.spatial.partition import plan_of
from keras_hpc.tools import rehearsal
from network import network

assert plan_of(network(), Grid((1,)), 4).messages(2) == (0, 0)

# In two parts the second one reads 1 row of the first one; the first one 2 of the second.
count, halo = plan_of(network(), Grid((2,)), 4).messages(2)
first = 2 * 2 * 12 * 3 * 4  # samples, rows, columns, channels, bytes: of the rank that receives most
second = 2 * 1 * 6 * 4 * 4
assert halo == first + 2 * second, halo  # nobody wants the gradient of the image
assert count == 2 * 3 + 4, count  # from both sides, and for the sums of BatchNormalization

# The other rank's rows of the output, and back their gradients: 8 rows of 6 columns, 2 channels.
assert plan_of(network(), Grid((2,)), 4).messages(2, whole=True) == (count + 4, halo + 2 * 2 * 4 * 8 * 6 * 2)

# A job of one rank stands in for a part.
keras_hpc.init()
shapes = []
with standing_in(Grid((2,)), 1):
    model = network()
    train = model.train_on_batch
    model.train_on_batch = lambda x, y: shapes.extend([x.shape, y.shape]) or train(x, y)
    assert 0 < rehearsal.step_of(model, 3)() < 10
    made = {name for name, _ in current.job().group._exchanges}
assert shapes == [(3, 16, 12, 3), (3, 8, 6, 2)], shapes
assert len(made) == 3, made  # of two convolutions and the sums of BatchNormalization
"""
LOSSES = """
import keras
import keras_hpc
from keras_hpc.job import current
from keras_hpc.spatial.geometry import Grid
from keras_hpc.tools import rehearsal
from keras_hpc.tools.alone import standing_in

def of_classes(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

def targets(loss, names=False):
    inputs = keras.Input((32, 12, 3))
    x = keras.layers.Conv2D(4, 3, padding="same")(inputs)
    outputs = [keras.layers.Conv2D(classes, 1, name=f"of_{classes}")(x) for classes in (2, 3)]
    model = keras.Model(inputs, dict(zip("ab", outputs)) if names else outputs)
    model.compile("sgd", loss)
    train, shapes = model.train_on_batch, []
    model.train_on_batch = lambda x, y: shapes.extend(a.shape for a in keras.tree.flatten(y)) or train(x, y)
    assert rehearsal.step_of(model, 3)() > 0
    return shapes

keras_hpc.init()
floats, classes = [(3, 16, 12, 2), (3, 16, 12, 3)], [(3, 16, 12)] * 2
sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
with standing_in(Grid((2,)), 1):
    assert targets("mse") == floats
    assert targets(sparse) == targets(of_classes) == classes
    assert targets(["mse", sparse]) == [floats[0], classes[1]]
    assert targets({"a": "mse", "b": of_classes}, names=True) == [floats[0], classes[1]]
    assert targets({"of_2": sparse, "of_3": "mse"}) == [classes[0], floats[1]]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "network.py").write_text(MODEL)
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    (tmp_path / "losses.py").write_text(LOSSES)
    return tmp_path


def run(folder, *words, backend="torch"):
    command = [sys.executable, *words]
    env = child_environment(backend, lean=True)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)


def test_messages_by_hand_and_a_part_alone(folder):
    done = run(folder, "by_hand.py")
    assert done.returncode == 0, done.stderr


def test_targets_are_what_losses_take(folder):
    done = run(folder, "losses.py")
    assert done.returncode == 0, done.stderr


def test_sums_and_the_best():
    link = plan_spatial.Link(1e-3, 1e6)
    found = {1: rehearsal.Rehearsed(1.0, 0, 0, 0), 2: rehearsal.Rehearsed(0.5, 20, 80_000, 0)}
    whole, half = (plan_spatial.expected(4, parts, of_part, link, 0.9) for parts, of_part in found.items())
    assert (whole.groups, whole.parts, half.groups, half.parts) == (4, 1, 2, 2)
    assert whole.step_s == pytest.approx(1.0 + 0.9 - 2 / 3)
    assert half.step_s == pytest.approx(0.6 + 0.9 - 2 / 3 * 0.6)
    assert plan_spatial.best([whole, half]) is whole


def test_parts_of_the_ranks_of_a_node():
    """All parts where they are there; else neighbours from the middle, whose parts have borders on both sides."""

    def parts_of(ranks, parts):
        return [rehearsal.part_of(rank, ranks, parts) for rank in range(ranks)]

    assert parts_of(4, 2) == [0, 1, 0, 1]
    assert parts_of(4, 4) == [0, 1, 2, 3]
    assert parts_of(2, 4) == [1, 2]
    assert parts_of(1, 4) == [1]
    assert parts_of(1, 2) == [0]


@pytest.mark.mpi
@pytest.mark.parametrize("backend", [pytest.param(b, marks=SOAK) for b in ("torch", "tensorflow", "jax")])
def test_a_real_model_on_one_node(backend, folder):
    """Two processes rehearse both arrangements."""
    words = ("-m", "keras_hpc", "plan", "--ranks", "2", "--nodes", "1", "--batch-size", "2")
    done = run(folder, *words, "--spatial", "network.py:in_a_job", backend=backend)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(\d) x (\d) +([\d.e+-]+) ms +([\d.e+-]+) ms +([\d.e+-]+) MB", done.stdout, re.M)
    assert [line[:2] for line in lines] == [("2", "1"), ("1", "2")]
    assert all(0 < float(rehearsed) <= float(step) for *_, step, rehearsed, _ in lines)
    assert float(lines[0][4]) == 0
    assert float(lines[1][4]) > 0
    assert re.search(r"^best: (2 x 1|1 x 2), init\(spatial=[12]\)$", done.stdout, re.M)


@pytest.mark.mpi
@pytest.mark.soak
def test_steps_beside_what_is_expected():
    command = [sys.executable, "-m", "benchmarks.planned", "--size", "64", "--parts", "2", "--pairs", "3"]
    done = launch(2, command, timeout=200, env=child_environment("torch"), cwd=ROOT)
    assert done.returncode == 0, done.output
    found = re.search(r"expected (\d+) ms \(CPU \d+\), measured (\d+) ms \(CPU \d+\)", done.output)
    assert found, done.output
    assert all(int(number) > 0 for number in found.groups())


@pytest.mark.soak
def test_more_nodes_than_there_are(folder):
    """One process stands in for each part; a sample of 6 rows is not split."""
    words = ("-m", "keras_hpc", "plan", "--ranks", "2", "--gb-per-s", "10", "--spatial", "network.py:few_rows")
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr
    assert [line[:5] for line in done.stdout.splitlines()[1:]] == ["2 x 1", "best:"], done.stdout


@pytest.mark.parametrize(
    ("model", "words"),
    [pytest.param("too_large", "no memory for this", marks=SOAK), ("unbuilt", "begins with keras.Input")],
)
def test_what_cannot_be_rehearsed_is_said(model, words, folder):
    """An arrangement whose ranks fail has its last words in its line; none left is an error."""
    done = run(folder, "-m", "keras_hpc", "plan", "--ranks", "1", "--spatial", f"network.py:{model}")
    assert done.returncode == 1
    assert "1 x 1" in done.stdout
    assert words in done.stdout
    assert "No arrangement could be rehearsed." in done.stderr


@pytest.mark.parametrize("given", ["model.py", "missing.py:network", "model.py:nothing"])
def test_what_is_no_model_is_refused(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("network = 1")
    with pytest.raises(SystemExit, match=r"Expected FILE.py:FUNCTION. Received: "):
        rehearsal.model_of(given)
