"""examples.resnet50: the published number of parameters, the recipe's rates by hand, its job, and one small study."""

import shlex
import sys

import numpy as np
import pytest
from launch import ROOT, child_environment, launch

from examples.resnet50 import study, train
from examples.resnet50.network import resnet50


def test_it_is_the_published_network():
    model = resnet50((224, 224, 3), 1001)
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == 25_559_081
    assert len([layer for layer in model.layers if layer.name.startswith("conv")]) == 53
    begins = [layer.gamma.numpy().max() for layer in model.layers if hasattr(layer, "gamma")]
    assert begins.count(0.0) == 16, "of each block, the last one"
    small = resnet50((28, 28, 1), 10, width=8)
    assert small.layers[-2].output.shape == (None, 256)
    assert small.layers[-3].output.shape == (None, 2, 2, 256), "28, halved four times"


def test_rates_of_the_paper():
    steps = 40  # of an epoch with 32,768 images of ImageNet, about
    rate = train.rate_of(train.PEAK_BATCH, 100 * steps)
    assert float(rate(0)) == pytest.approx(0.1)
    assert float(rate(12 * steps)) == pytest.approx(40)
    assert float(rate(6 * steps)) == pytest.approx(20.05)
    assert float(rate(56 * steps)) == pytest.approx((40 - 0.04) / 4 + 0.04)
    assert float(rate(100 * steps)) == pytest.approx(0.04), "a floor"
    assert float(train.rate_of(train.PEAK_BATCH // 4, 100)(12)) == pytest.approx(20)
    assert float(train.rate_of(128, 100, peak=3.0)(12)) == pytest.approx(3)


def test_the_job_is_what_the_template_prints():
    job = (ROOT / "examples" / "resnet50" / "job.sh").read_text()
    (line,) = [line for line in job.splitlines() if line.startswith("srun")]
    words = shlex.split(line)
    arguments = words[words.index("examples.resnet50.train") + 1 :]
    args = train.arguments(arguments)
    assert (args.global_batch, args.width, args.classes) == (8192, 64, 1000)
    options = "--nodes 32 --ranks-per-node 2 --cores-per-rank 32 --time 12:00:00 --job resnet50 -m"
    command = [sys.executable, "-m", "keras_hpc", "template", "slurm", *options.split(), "examples.resnet50.train"]
    done = launch(1, [*command, *arguments], timeout=100, env=child_environment("tensorflow"), mpi=False, cwd=ROOT)
    assert done.returncode == 0, done.output
    assert job in done.output


def test_files_to_learn_from_come_with_files_to_test_on(capsys):
    with pytest.raises(SystemExit):
        train.arguments(["--data", "train-*.h5"])
    assert "Received: train-*.h5, None" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.mpi
def test_own_files_and_a_training_that_goes_on(tmp_path):
    """Color images of 64 pixels, whose class is the color that is brightest."""
    random = np.random.default_rng(0)
    for name, count in (("train", 96), ("test", 32)):
        label = random.integers(0, 3, count)
        image = random.integers(0, 100, (count, 64, 64, 3), "uint8")
        image[np.arange(count), ..., label] += 120
        np.savez(tmp_path / f"{name}-0.npz", image=image, label=label)
    words = f"--data {tmp_path}/train-*.npz --tests {tmp_path}/test-*.npz --classes 3 --width 4 --global-batch 16"
    words += f" --flip --stage {tmp_path} --checkpoints {tmp_path}/saved --learning-rate 1 --out {tmp_path}/run"
    for epochs in (2, 6):
        command = [sys.executable, "-m", "examples.resnet50.train", *words.split(), "--epochs", str(epochs)]
        done = launch(2, command, timeout=300, env=child_environment("tensorflow"), cwd=ROOT)
        assert done.returncode == 0, done.output
        assert "Epoch 2/" in done.output if epochs == 2 else "Epoch 2/" not in done.output
    assert (tmp_path / "run" / "quality.json").exists()
    error = float(done.output.rpartition("test error ")[2].partition("%")[0])
    assert error < 30, "a third is right by chance"


@pytest.mark.soak
@pytest.mark.mpi
def test_a_small_study(tmp_path):
    words = f"--out {tmp_path} --seeds 1 --epochs 1 --width 2".split()
    command = [sys.executable, "-m", "examples.resnet50.study", *words]
    done = launch(1, command, timeout=600, env=child_environment("tensorflow"), mpi=False, cwd=ROOT)
    assert done.returncode == 0, done.output
    assert done.output.count(" % |") == 4
    assert "| 128 | 41,000 | 2 | " in done.output
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_table_by_hand():
    table = [{"batch": 32, "ranks": 1, "error": 0.0125, "error spread": 0.001}]
    assert study.markdown(table).splitlines()[2] == "| 32 | 10,200 | 1 | 1.25 ± 0.10 % |"
