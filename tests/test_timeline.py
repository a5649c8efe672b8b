"""What is learned of a trace: when each gradient is there, and how much steps vary."""

import dataclasses
import json

import pytest

from keras_hpc.tools import timeline

TENSORS = ["1: bias", "0: kernel"]  # the order of a plan


def _event(rank, kind, name, begin, end):
    return {"ph": "X", "pid": rank, "tid": 0, "cat": kind, "name": name, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}


def _step(rank, begin, factor):
    """A step of 1 s: gradients after 0.4 and 0.8 s, which come back after a wait of 3 s; the update takes 0.2 s."""
    first, last = begin + 0.4 * factor, begin + 0.8 * factor
    back = last + 3
    return [
        _event(rank, "step", "model train", begin, back + 0.2 * factor),
        _event(rank, "start", TENSORS[0], first, first),
        _event(rank, "start", TENSORS[1], last, last),
        *(_event(rank, "wait", name, last, back) for name in TENSORS),
        _event(rank, "start", "moments", begin, begin),  # of another plan
    ]


def _trace(tmp_path, factors, *, plans=True, dtype="float32"):
    """Steps of two ranks that take so many times as long as others; a pair: each rank its own."""
    events = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}}]
    for rank in (0, 1):
        for number, factor in enumerate([9, 9, *factors]):  # the first two warm up
            events += _step(rank, 100.0 * number, factor[rank] if isinstance(factor, tuple) else factor)
    tensors = [{"name": name, "dtype": dtype, "elements": n} for name, n in zip(TENSORS, (10, 1000), strict=True)]
    few = {"team": 0, "name": "normalization", "tensors": [{"name": "moments", "dtype": "float32", "elements": 4}]}
    gradients = {"team": 0, "name": "optimizer1", "tensors": tensors}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"plans": [few, gradients] if plans else []}}))
    return path


def test_waiting_is_no_part_of_a_step(tmp_path):
    found = timeline.read(_trace(tmp_path, [1, 1, 1]))
    assert found.elements == (10, 1000)
    assert found.ready == pytest.approx((0.5, 1.0))
    assert found.compute_s == pytest.approx(0.8)
    assert found.update_s == pytest.approx(0.2)
    assert found.step_s == pytest.approx(1)
    assert found.variation == pytest.approx([1] * 6)


def test_variation_is_that_of_the_steps(tmp_path):
    found = timeline.read(_trace(tmp_path, [0.9, 1, 1.5]))
    assert found.step_s == pytest.approx(1)
    assert found.variation == pytest.approx([0.9, 1, 1.5] * 2)


def test_what_slows_all_ranks_is_not_their_own_variation(tmp_path):
    assert timeline.read(_trace(tmp_path, [0.9, 1, 1.5])).own_variation == pytest.approx([1] * 6)
    found = timeline.read(_trace(tmp_path, [1, 1, (2.0, 2.2)]))
    assert found.variation == pytest.approx([1, 1, 2, 1, 1, 2.2])
    half = 2**0.5 * 0.1 / 2.1  # of two independent ranks' difference, as far as one deviates
    assert found.own_variation == pytest.approx([1, 1, 1 - half, 1, 1, 1 + half])


def test_elements_count_as_float32(tmp_path):
    assert timeline.read(_trace(tmp_path, [1, 1], dtype="bfloat16")).elements == (5, 500)


def test_what_is_written_can_be_read_and_scaled(tmp_path):
    found = timeline.read(_trace(tmp_path, [0.9, 1, 1.5]))
    found.write(tmp_path / "timeline.json")
    assert timeline.read(tmp_path / "timeline.json") == found
    assert found.scaled(0.3).step_s == pytest.approx(0.3)
    assert found.scaled(0.3).update_s == pytest.approx(0.06)
    assert dataclasses.replace(found.scaled(0.3), compute_s=0, update_s=0) == dataclasses.replace(
        found, compute_s=0, update_s=0
    )


def test_errors_say_what_is_missing(tmp_path):
    with pytest.raises(timeline.TimelineError, match=r"at least 4 training steps .* Found: 2\. Received: .*trace.json"):
        timeline.read(_trace(tmp_path, [1]))
    with pytest.raises(timeline.TimelineError, match="No plan lived until finalize"):
        timeline.read(_trace(tmp_path, [1, 1], plans=False))
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(timeline.TimelineError, match=r"Expected a file that init\(trace=\.\.\.\) wrote"):
        timeline.read(tmp_path / "other.json")
