"""examples.cnn.benchmark: its arithmetic by hand, and one small run."""

import csv
import json
import sys

import nbclient
import nbformat
import numpy as np
import pytest
from launch import ROOT, child_environment, launch

from benchmarks import page
from examples.cnn import benchmark, networks


def _rank(step, **parts):
    zero = dict.fromkeys([f"{name}_ms" for name in ("gap", "draw", "forward", "exposed", "hidden", "update")], 0.0)
    return {"parameters": 7, "step_ms": step} | zero | parts


ARGUMENTS = ["--batch-size", "8", "--ranks", "1,2"]


def test_weak_and_strong_scaling():
    for strong, batch, efficiency in ((False, 8, 0.8), (True, 4, 0.4)):
        args = benchmark.arguments([*ARGUMENTS, *["--strong"] * strong])
        plain, hooked, one, two = benchmark.settings(args)
        assert (plain.distributed, one.distributed, two.ranks, two.batch_size) == (False, True, 2, batch)
        assert (hooked.ranks, hooked.batch_size) == (1, 8)
        runs = [
            (plain, [{"ranks": [_rank([10, 10, 30])]}]),
            (one, [{"ranks": [_rank([10, 10, 10])]}]),
            # The slowest rank in each step counts: 10, 12.5, 12.5; then 12.5, 13, 12.
            (two, [{"ranks": [_rank([10, 5, 12.5]), _rank([9, 12.5, 5])]}, {"ranks": [_rank([12.5, 13, 12])] * 2}]),
        ]
        lines = benchmark.scaling(runs, args)
        assert [line["step_ms"] for line in lines] == [10, 10, 12.5]
        assert lines[2]["efficiency"] == pytest.approx(efficiency)
        assert lines[2]["samples/s"] == pytest.approx(1000 * 2 * batch / 12.5)


def test_profile_adds_up_to_the_step():
    parts = {"gap_ms": 1.0, "draw_ms": 2.0, "forward_ms": 5.0, "exposed_ms": 3.0, "hidden_ms": 40.0, "update_ms": 4.0}
    setting = benchmark.Setting(2, True, 8)
    rounds = [{"ranks": [_rank([20, 20], **parts), _rank([30, 30])]}]
    first, second, mean = benchmark.profile([(setting, rounds)])
    assert (first["input"], first["forward"], first["backward"], first["hidden"]) == (3, 5, 20 - 2 - 5 - 3 - 4, 40)
    assert sum(first[name] for name in benchmark.PARTS if name != "hidden") == pytest.approx(20 + 1)
    assert second["backward"] == 30
    assert mean["rank"] == "mean"
    assert mean["backward"] == pytest.approx((6 + 30) / 2)


def test_the_page_knows_reports_with_forward_and_without():
    old, new = {"input": 1.0, "compute": 2.0, "exposed": 3.0, "update": 4.0, "hidden": 5.0}, range(6)
    for profile, columns in ((old, 5), (dict(zip(benchmark.PARTS, map(float, new), strict=True)), 6)):
        report = {"kind": "training", "title": "t", "versions": {}, "scaling": [], "check_replicas_ms": {}}
        report["arguments"] = {"model": "mlp", "backend": "jax", "rounds": 1, "steps": 8, "out": "/tmp/a"}
        report["profile"] = [{"runs": "Keras", "rank": "mean"} | profile]
        (line,) = (line for line in page.page([report]).splitlines() if line.startswith("| Keras"))
        assert line.count(".") == columns
        head = next(line for line in page.page([report]).splitlines() if line.startswith("| runs | input"))
        assert ("forward and backward, ms" in head) == (columns == 5)
        assert (" forward, ms | backward, ms " in head) == (columns == 6)
        command = "`python -m examples.cnn.benchmark --model mlp --backend jax --rounds 1 --steps 8`"
        assert command in page.page([report]).splitlines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0,2"], "Received: '0,2'"),
        (["--ranks", "two"], "Received: 'two'"),
        (["--ranks", "3", "--strong", "--batch-size", "8"], "must divide --batch-size. Received: 8"),
        (["--model", "lenet6"], "invalid choice: 'lenet6'"),
    ],
)
def test_wrong_use_is_explained(words, said, capsys):
    with pytest.raises(SystemExit):
        benchmark.arguments(words)
    assert said in capsys.readouterr().err


PARAMETERS = """
import json
import math
from examples.cnn.networks import NETWORKS
sizes = {}
for name, network in NETWORKS.items():
    if name not in ("resnet50", "inception_v3", "vgg16"):  # which are Keras' own
        shape = {"hep_cnn": (224, 224, 3), "alexnet": (227, 227, 3)}.get(name, network.shape)
        sizes[name] = network.build(shape, network.classes).count_params()
small = NETWORKS["hep_cnn"]
sizes["hep_cnn, small"] = small.build(small.shape, small.classes).count_params()
from examples.cosmoflow import train as cosmoflow
sizes["cosmoflow"] = cosmoflow.network(128).count_params()
from examples.cosmogan import train as cosmogan
for name in ("generator", "discriminator"):
    sizes[f"cosmogan, {name}"] = getattr(cosmogan, name)(256, 64, 4).count_params()
from examples.atoms import train as atoms
weights = atoms.resnet50((224, 224, 3), 1001).trainable_variables
sizes["resnet50, trainable"] = sum(math.prod(weight.shape) for weight in weights)
print(json.dumps(sizes))
"""


def test_networks_are_the_published_ones(run_ranks):
    done = run_ranks(1, ["-c", PARAMETERS], backend="torch", env={"TESTS_EXAMPLES": "1"}, mpi=False)
    assert json.loads(done.output.splitlines()[-1]) == {
        "lenet": 1_199_882,
        "mlp": 50_384_906,
        "hep_cnn": 594_178,  # Kurth et al.
        "hep_cnn, small": 446_594,
        "alexnet": 62_378_344,
        "cosmogan, generator": 12_826_369,  # Mustafa et al.
        "cosmogan, discriminator": 4_438_017,
        "resnet50, trainable": 25_559_081,  # 1,001 classes, in the paper of Cray's plugin
        "cosmoflow": 5_597_604,  # dense 32,768 x 128 and its bias are 4,194,432 of them
    }


def test_synthetic_data_are_the_same_for_all():
    x, y = networks.data((5, 5, 2), 3, 40)
    again, _ = networks.data((5, 5, 2), 3, 40)
    np.testing.assert_array_equal(x, again)
    assert (x.shape, x.dtype, y.dtype, set(y)) == ((40, 5, 5, 2), np.float32, np.int32, {0, 1, 2})


@pytest.mark.soak
@pytest.mark.mpi
def test_a_small_run_and_its_notebook(tmp_path, monkeypatch):
    out = tmp_path / "lenet-torch"
    words = ["--model", "lenet", "--batch-size", "4", "--steps", "3", "--rounds", "1", "--backend", "torch"]
    command = [sys.executable, "-m", "examples.cnn.benchmark", *words, "--out", str(out)]
    done = launch(1, command, timeout=240, env=child_environment("torch"), mpi=False)
    assert done.returncode == 0, done.output
    assert "check_replicas on 2 ranks" in done.output
    runs = json.loads((out / "steps.json").read_text())
    assert [len(run["rounds"][0]["ranks"]) for run in runs] == [1, 1, 1, 2]
    assert all(len(rank["step_ms"]) == 3 for run in runs for rank in run["rounds"][0]["ranks"])
    two = runs[3]["rounds"][0]["ranks"][0]
    assert two["exposed_ms"] + two["hidden_ms"] > 0, "two ranks communicate"
    assert runs[2]["rounds"][0]["ranks"][0]["exposed_ms"] == 0
    found = page.page([json.loads((out / "benchmark.json").read_text())])
    assert "## Training: lenet, 1,199,882 parameters" in found
    assert [line.split("|")[1].strip() for line in found.splitlines() if line.startswith("| ")] == [
        *("runs", "Keras", "1 rank, hooked", "1 rank", "2 ranks"),
        *("runs", "Keras", "1 rank, hooked", "1 rank", "2 ranks"),
    ]
    with (out / "scaling.csv").open() as file:
        assert [line["runs"] for line in csv.DictReader(file)] == ["Keras", "1 rank, hooked", "1 rank", "2 ranks"]
    for name in ("scaling.png", "profile.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")

    source = (ROOT / "docs/notebooks/scaling.ipynb").read_text()
    monkeypatch.setenv("SCALING_RESULTS", str(tmp_path))
    notebook = nbformat.reads(source, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert "lenet-torch             2 ranks" in outputs[-1]["text"]
