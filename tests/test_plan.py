"""`python -m keras_hpc plan`: the numbers of published jobs, and what is said to be the limit."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from keras_hpc.tools import plan

# ResNet50 on ImageNet, 1,024 nodes: Kurth et al., "TensorFlow at Scale", give 14.9 GB/s.
IMAGENET = plan.Job(
    1024, 1024, samples=1_281_167, batch_size=32, step_ms=300, parameters=25_559_081, sample_bytes=137e3
)
FAST = plan.Network(between_gb_per_s=8, between_us=2)


def test_published_numbers():
    found = plan.estimate(IMAGENET, FAST)
    assert found["read_gb_per_s"] == pytest.approx(14.9, abs=0.1)
    assert found["gradient_mb"] / 1.048576 == pytest.approx(97.5, abs=0.01)  # MiB
    assert found["steps"] == 40  # 39.1
    assert found["global_batch"] == 32_768


def test_efficiency_by_hand():
    job = plan.Job(ranks=8, nodes=4, samples=800, batch_size=10, step_ms=100, parameters=50_000_000, sample_bytes=1)
    network = plan.Network(between_gb_per_s=1, between_us=100, inside_gb_per_s=4)
    # 200 MB: 2 * 3/4 of it through the link, 2 * 2 messages, and 2 * 1/2 of it inside the node.
    reduction = 300 + 0.4 + 50
    found = plan.estimate(job, network)
    assert found["reduction_ms"] == pytest.approx(reduction)
    assert found["sent_mb"] == pytest.approx(300)
    assert found["efficiency_exposed"] == pytest.approx(100 / (100 + reduction))
    assert found["efficiency"] == pytest.approx(100 / (100 + reduction - 200 / 3))
    assert found["epoch_s"] == pytest.approx(10 * (0.1 + reduction / 1e3 - 0.2 / 3))


def test_one_rank_needs_no_network():
    found = plan.estimate(dataclasses.replace(IMAGENET, ranks=1, nodes=1), plan.Network(between_gb_per_s=1e-9))
    assert found["reduction_ms"] == 0
    assert found["efficiency"] == 1


def test_the_limit_is_named():
    found = plan.estimate(IMAGENET, FAST)
    assert plan.limit(found, 300, read_gb_per_s=10).startswith("input is the limit")
    assert plan.limit(found, 300, read_gb_per_s=20) == "computing"
    slow = plan.estimate(IMAGENET, plan.Network(between_gb_per_s=0.1))
    assert plan.limit(slow, 300, read_gb_per_s=20).startswith("communication is the limit")


def _run(*arguments):
    given = "--ranks 8 --nodes 4 --samples 800 --batch-size 10 --step-ms 100 --parameters 1_000_000 --sample-bytes 4000"
    command = [sys.executable, "-m", "keras_hpc", "plan", *given.split(), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_what_doctor_measured_is_used(tmp_path):
    file = tmp_path / "doctor.json"
    fast, slow = ({"between": {"gb_per_s": speed, "latency_us": 10.0}} for speed in (1.0, 0.01))
    for summary, word in ((fast, "limit               computing"), (slow, "communication is the limit")):
        file.write_text(json.dumps({"summary": summary}))
        done = _run("--doctor", file)
        assert word in done.stdout, done
    assert "steps of an epoch   10" in done.stdout
    # 0.32 MB in 100 ms: 0.0032 GB/s on four nodes. Two were measured.
    for speed, word in (
        (4e6, "input is the limit: the ranks need 0.0032 GB/s"),
        (9e9, "limit               computing"),
    ):
        file.write_text(json.dumps({"summary": fast, "data": {"nodes": [speed / 20, speed / 20]}}))
        assert word in _run("--doctor", file).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "How fast is a node's link? Expected --gb-per-s, or --doctor"),
        (["--doctor", "nothing.json"], "Received: nothing.json"),
        (["--nodes", "3", "--gb-per-s", "1"], "Expected a multiple of 3. Received: --ranks 8"),
        (["--step-ms", "-1"], "expected a number between 0 and 1e+18. Received: '-1'"),
        (["--step-ms", "inf"], "expected a number between 0 and 1e+18. Received: 'inf'"),
        (["--samples", "1.5"], "expected a whole number between 0 and 1e+18. Received: '1.5'"),
        (["--parameters", "1" + 400 * "0"], "expected a whole number between 0 and 1e+18. Received: '1000"),
    ],
)
def test_wrong_use_is_explained(arguments, said):
    done = _run(*arguments)
    assert done.returncode != 0
    assert said in done.stderr


def _simulated(*arguments, **environment):
    command = [sys.executable, "-m", "keras_hpc", "plan", "--simulate", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=os.environ | environment
    )


def test_what_is_missing_for_a_simulation_is_said(tmp_path):
    assert "Expected --nodes" in _simulated("edr").stderr
    assert "Expected --trace, or --step-ms and --parameters" in _simulated("edr", "--nodes", 4).stderr
    step = ["--nodes", 4, "--step-ms", 10, "--parameters", 1000]
    assert (
        "Expected aries, edr, edr-4096, hdr, switch or an XML file of SimGrid's. Received: moon"
        in _simulated("moon", *step).stderr
    )
    done = _simulated("edr", *step, PATH=str(tmp_path))
    assert done.returncode != 0
    assert "SimGrid is not installed (Debian: apt-get install libsimgrid-dev)" in done.stderr
    assert "Give both" in _run("--gb-per-s", 1, "--trace", "trace.json").stderr
