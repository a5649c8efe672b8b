"""Ranks that wait too long: a report on rank 0 says who has come, who has not, and where each is; then the job ends."""

import dataclasses
import re
from pathlib import Path

import pytest

from keras_hpc.job.watchdog import report
from keras_hpc.job.watchdog.state import GONE, Place, Stall, State, stacks

SCRIPT = Path(__file__).parent / "ranks" / "fail_waiting.py"
LIMIT_SECONDS = 4  # timeout_seconds of the script
END_SECONDS = 20  # in which the job must end after it


def line_of(how):
    """The frame of the script in which a rank hangs."""
    lines = SCRIPT.read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if line.endswith(f"# the line of {how}"))
    return f'File "{SCRIPT}", line {number} in misbehave'


def reports_in(log):
    """The reports of rank 0, each with the lines before it."""
    return re.split(r"The job ends when a wait reaches 4 s \(timeout_seconds\)\.\n", log)[:-1]


def check_end(done):
    failed_at = float(re.search(r"FAILS AT ([\d.]+)", done.output)[1])
    assert done.ended_at - failed_at < LIMIT_SECONDS + END_SECONDS
    assert "went on to the end" not in done.output


@pytest.mark.mpi
def test_each_wait_is_reported_once(run_ranks, tmp_path):
    """Those that end by themselves, and at last one that ends the job."""
    stopped = "does not answer: its process is stopped (by SIGSTOP, or a debugger)."
    native = "but runs no Python: perhaps native code that holds the GIL."
    cases = [  # which ranks are late, what they do for how long, and what is said of them
        ({1, 2}, "sleep:2:3.4,sleep:1:1.7", line_of("sleep")),  # rank 1 begins to wait when there is a report already
        ({1}, "loop:1:1.5", line_of("loop")),
        ({2}, "stop:2:3.3", stopped),
        ({1}, "native:1:3", native),
        ({2}, "skip:2", line_of("skip")),
    ]
    words = [word for _, word, _ in cases]
    done = run_ranks(3, [SCRIPT, "--logs", tmp_path, *words], backend="jax", expect_failure=True)
    check_end(done)
    logs = [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(3)]
    everything = "\n".join(logs)
    reports = reports_in(logs[0])
    assert len(reports) == len(cases), everything
    for number, ((late, _, said), text) in enumerate(zip(cases, reports, strict=True), start=1):
        place = f"step {4 * number} of plan 'gradients' (team 0), tensor 'kernel'"
        others = report.ranks_text({0, 1, 2} - late)
        # Who comes to a wait later has waited less than is reported.
        assert re.search(rf"ranks? [\d, ]+ waited \d s in {re.escape(place)}\.\n", text), everything
        # Where other jobs keep the cores busy, one may not answer in time.
        assert f"  arrived: {others}\n" in text or "  not known: " in text, everything
        assert f"  missing: {report.ranks_text(late)}\n" in text, everything
        head = f"keras_hpc: {report.ranks_text(late)} {'(' if len(late) == 1 else 'are here'}"
        assert said in text.partition(head)[2], everything
        assert logs[0].count(f"{place} goes on, after") == (number < len(cases)), everything
        if "File" in said:  # in their own logs, too
            assert all(said in logs[rank] for rank in late), everything
    assert re.search(
        r"rank 2 waited \d s in barrier \(team 0, call \d+\)\.\n.*arrived: rank 2\n.*ranks 0, 1\n", logs[0]
    )
    assert re.search(r"keras_hpc: rank \d ends the job: uncaught \w*Error: .*(rank 2|barrier)", logs[0])
    assert "Traceback" in everything


@pytest.mark.mpi
def test_rank_0_that_sleeps_in_fit(run_ranks, tmp_path):
    """It waits for nobody, and yet says why the other one ends the job."""
    done = run_ranks(2, [SCRIPT, "--fit", "--logs", tmp_path, "sleep:0"], backend="jax", expect_failure=True)
    check_end(done)
    log = (tmp_path / "rank0.txt").read_text()
    (text,) = reports_in(log)
    assert re.search(r"rank 1 waited \d s in step \d of plan 'optimizer\d*' \(team 0\), tensor '1: bias'\.\n", text)
    assert "  missing: rank 0\n" in text
    assert line_of("sleep") in text
    assert re.search(r"keras_hpc: rank 1 ends the job: uncaught .*Tensor '1: bias' of plan 'optimizer", log)


@pytest.mark.soak
@pytest.mark.mpi
def test_rank_0_that_is_stopped(run_ranks):
    """The other rank tells what it sees, and ends the job."""
    done = run_ranks(2, [SCRIPT, "stop:0"], backend="jax", expect_failure=True)
    check_end(done)
    assert re.search(r"rank 1 waited \d s in step 4 of plan 'gradients' \(team 0\), .* for rank 0\.", done.output)
    assert re.search(r"rank 0 \(\S+, process \d+\) does not answer: its process is stopped", done.output)
    assert "rank 1 ends the job: uncaught CommunicationTimeoutError: Tensor 'kernel' of plan 'gradients'" in done.output


# ---- the report, of ranks that are made up

PLACES = [Place(f"host{rank // 2}", 100 + rank, "1") for rank in range(4)]


def waiting(rank, what="plan 3 optimizer1", number=7, detail="bias", tensor=1, missing=()):
    stall = Stall(0, what, number, detail, tensor, 31.2, list(missing))
    return State(rank, [stall], {"0": {what: (number, [])}}, [("MainThread", ['File "/a.py", line 1 in f'])], {})


def elsewhere(rank, number, not_started=(), neighbours=None):
    progress = {"0": {"plan 3 optimizer1": (number, list(not_started)), "collective": (1, [])}}
    stack = [("MainThread", ['File "/b.py", line 2 in g', 'File "/a.py", line 9 in <module>'])]
    return State(rank, [], progress, stack, neighbours or {})


def text_of(*states):
    return report.text({state.rank: state for state in states}, PLACES, {0: range(4)}, 300.0)


def test_who_has_come_and_who_has_not():
    text = text_of(waiting(0), elsewhere(1, 7, [0]), elsewhere(2, 7, [0, 1]), elsewhere(3, 6))
    assert "rank 0 waited 31 s in step 7 of plan 'optimizer1' (team 0), tensor 'bias'." in text
    assert "arrived: ranks 0, 1\n" in text
    assert "missing: ranks 2, 3\n" in text
    assert "arrived: ranks 0 to 3\n" in text_of(waiting(0), *(elsewhere(rank, 8, [0, 1]) for rank in (1, 2, 3)))


def test_who_has_left_without_its_part():
    def left(*states):
        return report.has_left({state.rank: state for state in states}, {0: range(4)})

    def leaving(rank, number):
        return dataclasses.replace(elsewhere(rank, number), leaves=True)

    assert left(waiting(0), elsewhere(1, 6), leaving(2, 7)) is None
    rank, stall = left(waiting(0), elsewhere(1, 6), leaving(2, 6))
    assert (rank, stall.what) == (2, "plan 3 optimizer1")
    # A plan that it does not know may have ended when it had done its part.
    assert left(waiting(0, what="plan 4 optimizer2"), leaving(2, 6)) is None


def test_equal_stacks_are_shown_once_and_those_of_ranks_that_wait_in_a_line():
    text = text_of(waiting(0), elsewhere(1, 6), elsewhere(2, 6), elsewhere(3, 6))
    assert text.count("line 9 in <module>") == 1
    assert 'ranks 1 to 3 are here, innermost first:\nkeras_hpc:   File "/b.py", line 2 in g\n' in text
    assert 'rank 0 (host0, process 100) is at File "/a.py", line 1 in f\n' in text


def test_a_rank_that_does_not_answer():
    ended = elsewhere(1, 7, neighbours={"0": GONE})
    text = text_of(waiting(2, missing=[0]), ended)
    assert "missing: rank 0\n" in text
    assert "not known: rank 3\n" in text
    assert "rank 0 (host0, process 100) does not answer: its process has ended.\n" in text
    assert "rank 3 (host1, process 103) does not answer: nothing is known of its process.\n" in text
    assert report.has_ended(0, [ended])
    assert not report.has_ended(3, [ended])


def test_ranks_that_make_different_calls():
    calls = [waiting(rank, "collective", 5, "barrier", -1) for rank in (0, 1, 2)]
    text = text_of(*calls, waiting(3, "collective", 5, "allgather", -1))
    assert "ranks 0 to 2 waited 31 s in barrier (team 0, call 5).\n" in text
    assert "arrived: ranks 0 to 2\nkeras_hpc:   missing: rank 3\n" in text
    assert "arrived: rank 3\nkeras_hpc:   missing: ranks 0 to 2\n" in text


def test_the_main_thread_comes_first_and_the_own_one_is_left_out():
    import threading

    end, found = threading.Event(), []
    waiter = threading.Thread(target=lambda: end.wait(30), name="the waiter")
    waiter.start()
    looker = threading.Thread(target=lambda: found.extend(stacks()), name="the looker")
    looker.start()
    looker.join()
    end.set()
    waiter.join()
    names = [name for name, _ in found]
    assert names[0] == "MainThread"
    assert "the waiter" in names
    assert "the looker" not in names
    frames = dict(found)["MainThread"]
    assert any(f'File "{__file__}"' in frame and "test_the_main_thread" in frame for frame in frames)


def test_a_process_that_has_ended_is_seen(tmp_path):
    import subprocess

    mine = Place.mine()
    assert mine.process() == "R"
    assert Place(mine.host, mine.pid, "0").process() == GONE  # another process got its number
    with subprocess.Popen(["sleep", "30"]) as process:
        born = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        other = Place(mine.host, process.pid, born)
        assert other.process() in "SRD"
        process.kill()
        while other.process() in "SRD":
            pass
        assert other.process() == GONE  # it still is a zombie
