"""The engine on simulated nodes: what its schedules take, to the microsecond, and what no schedule can beat."""

import os
import subprocess
import sys

import pytest

from keras_hpc.tools import simulator, timeline

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))
NODES, BYTES = 16, 2**20
# Simulated microseconds on Aries. A change of a schedule, of waiting or of what a lane does changes them: look whether
# it is what you meant, and put the new ones here.
EXPECTED = {
    "recursive_doubling": 2919.103,
    "rabenseifner": 852.52,
    "ring": 624.608,
    "pairwise": 642.453,
    "radix_k": 654.986,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A user's cache folder."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def simulate(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("platform")
    with pytest.MonkeyPatch.context() as patch:  # what takes its time here is compiling it
        patch.setenv("CMAKE_BUILD_TYPE", "None")
        patch.setenv("CXXFLAGS", "-O1")
        program = simulator.build(cache / "keras_hpc" / "simulator")

    def run(platform, nodes, *options, **settings):
        return simulator.simulate(program, simulator.PLATFORMS[platform], nodes, folder, options, **settings)

    return run


@pytest.mark.parametrize("algorithm", EXPECTED)
def test_microseconds_of_an_allreduce(simulate, algorithm):
    found = simulate("aries", NODES, "--algorithm", algorithm, "--bytes", BYTES)
    assert found["algorithm"] == algorithm
    assert found["us"] == pytest.approx(EXPECTED[algorithm], rel=1e-3)


@pytest.mark.parametrize("algorithm", EXPECTED)
def test_messages_take_as_long_as_those_of_smpi(simulate, algorithm):
    """The engine's transport over SMPI, which polls, against messages that a simulated rank can wait for."""
    smpi = simulate("aries", NODES, "--algorithm", algorithm, "--bytes", BYTES, "--messages", "mpi")
    assert smpi["us"] == pytest.approx(EXPECTED[algorithm], rel=0.03)


def test_steps_take_as_long_as_with_smpi(simulate, tmp_path):
    rows = [(BYTES // 4, at / 20) for at in range(20)]
    times = [
        simulate(
            "edr", 12, "--tensors", _tensors(tmp_path, rows), "--compute-s", 0.02, "--messages", kind, "--repeats", 2
        )
        for kind in ("mpi", "simgrid")
    ]
    assert times[1]["step_ms"] == pytest.approx(times[0]["step_ms"], rel=0.01)
    assert times[1]["exposed_ms"] == pytest.approx(times[0]["exposed_ms"], rel=0.1)


@pytest.mark.parametrize("algorithm", ["rabenseifner", "ring", "pairwise", "radix_k"])
def test_nothing_is_faster_than_the_links(simulate, algorithm):
    # With arithmetic that takes no time: each node sends 2 (p - 1) / p of the bytes at 10 GB/s.
    free = ["--reduce-rate", 1e15, "--copy-rate", 1e15]
    found = simulate("switch", NODES, "--algorithm", algorithm, "--bytes", 64 * BYTES, *free)
    least = 2 * (NODES - 1) / NODES * 64 * BYTES / 10e9 * 1e6
    assert least <= found["us"] < 1.1 * least  # the ring naps in each of its 30 steps


def test_arithmetic_takes_its_time(simulate):
    fast = simulate("switch", 2, "--algorithm", "rabenseifner", "--bytes", BYTES, "--reduce-rate", 1e15)
    slow = simulate("switch", 2, "--algorithm", "rabenseifner", "--bytes", BYTES, "--reduce-rate", 1e9)
    half = BYTES / 2 / 1e9 * 1e6  # each node adds up half of the bytes
    assert slow["us"] - fast["us"] == pytest.approx(half, rel=0.1)


def _tensors(folder, rows):
    path = folder / "tensors"
    path.write_text("".join(f"{elements} {at}\n" for elements, at in rows))
    return path


def test_a_step_hides_what_comes_early(simulate, tmp_path):
    early = _tensors(tmp_path, [(BYTES // 4, 0.1)] * 4 + [(16, 1.0)])
    found = simulate("aries", NODES, "--tensors", early, "--compute-s", 0.09, "--update-s", 0.01)
    assert found["buckets"] == 5
    assert 0 < found["exposed_ms"] < 0.2
    assert found["step_ms"] == pytest.approx(100 + found["exposed_ms"], abs=0.01)
    late = _tensors(tmp_path, [(BYTES // 4, 1.0)] * 4)
    found = simulate("aries", NODES, "--tensors", late, "--compute-s", 0.09, "--update-s", 0.01)
    assert found["exposed_ms"] > 1.5  # 4 MiB through a link of 5.25 GB/s, out and in
    assert found["efficiency"] == pytest.approx(100 / found["step_ms"], rel=1e-4)


def test_gradients_may_come_in_any_order(simulate, tmp_path):
    rows = [(BYTES // 4, at) for at in (0.1, 0.2, 0.3, 0.4)]
    forth, back = (
        simulate("edr", 4, "--tensors", _tensors(tmp_path, some), "--compute-s", 0.01) for some in (rows, rows[::-1])
    )
    assert forth["exposed_ms"] == 0
    assert back["exposed_ms"] == 0
    assert forth["step_ms"] == pytest.approx(back["step_ms"])


def test_steps_wait_for_the_slowest_node(simulate, tmp_path):
    tensors = _tensors(tmp_path, [(16, 1.0)])
    steps = tmp_path / "steps"
    steps.write_text("0.09\n0.11\n")
    found = simulate(
        "switch", 64, "--tensors", tensors, "--variation", steps, "--compute-s", 0.1, "--update-s", 0, "--repeats", 4
    )
    assert found["step_ms"] == pytest.approx(110, rel=0.01)


def test_several_threads_share_the_work(simulate, tmp_path):
    """Where arithmetic decides, two lanes take half the time; where the link does, no less."""
    tensors = _tensors(tmp_path, [(BYTES // 4, 1.0)] * 64)

    def exposed(lanes, *options):
        found = simulate("switch", 4, "--tensors", tensors, "--compute-s", 0.01, "--lanes", lanes, *options)
        assert found["buckets"] == 64
        return found["exposed_ms"]

    assert exposed(2, "--reduce-rate", 1e9) == pytest.approx(exposed(1, "--reduce-rate", 1e9) / 2, rel=0.1)
    free = ["--reduce-rate", 1e15, "--copy-rate", 1e15]
    assert 2 * 3 / 4 * 64 * BYTES / 10e9 * 1e3 <= exposed(2, *free) <= exposed(1, *free)


def test_steps_of_the_library_block(simulate, tmp_path):
    """Each of four buckets is reduced once it is there: nothing of the last one is hidden."""
    tensors = _tensors(tmp_path, [(BYTES // 4, at) for at in (0.1, 0.2, 0.3, 1.0)])
    once = simulate("switch", 8, "--algorithm", "mpi", "--bytes", BYTES, library="mvapich2")
    found = simulate(
        "switch",
        8,
        "--algorithm",
        "mpi",
        "--tensors",
        tensors,
        "--compute-s",
        0.05,
        "--update-s",
        0,
        library="mvapich2",
    )
    assert found["buckets"] == 4
    assert found["exposed_ms"] == pytest.approx(once["us"] / 1e3, rel=0.1)


def test_the_library_has_an_allreduce_too(simulate):
    found = simulate("switch", NODES, "--algorithm", "mpi", "--bytes", 8 * BYTES, library="mpich")
    assert found["us"] >= 2 * (NODES - 1) / NODES * 8 * BYTES / 10e9 * 1e6


def test_errors_say_what_is_wrong(simulate):
    with pytest.raises(simulator.SimulatorError, match="Expected 2 to 1536 nodes"):
        simulate("aries", 5000)
    with pytest.raises(simulator.SimulatorError, match="Unknown algorithm of an allreduce"):
        simulate("aries", 2, "--algorithm", "tree")
    with pytest.raises(simulator.SimulatorError, match="Unknown kind of messages"):
        simulate("aries", 2, "--messages", "letters")
    with pytest.raises(simulator.SimulatorError, match="Expected one lane, or several with messages of SimGrid's"):
        simulate("aries", 2, "--messages", "mpi", "--lanes", 2)
    with pytest.raises(simulator.SimulatorError, match="Unknown option"):
        simulate("aries", 2, "--speed", 1)


def _plan(*arguments, cache):
    command = [sys.executable, "-m", "keras_hpc", "plan", "--simulate", *map(str, arguments)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


def test_a_plan_says_what_steps_take(cache, simulate, tmp_path):
    step = timeline.Timeline((1 << 20,) * 4, (0.4, 0.6, 0.8, 1.0), 0.09, 0.01, (0.9, 1.0, 1.1))
    step.write(tmp_path / "trace.json")
    done = _plan("edr", "--nodes", 16, "--trace", tmp_path / "trace.json", cache=cache)
    assert done.returncode == 0, done
    rows = {line[:20].strip(): line[20:] for line in done.stdout.splitlines()}
    assert rows["simulated"].startswith("16 nodes of: InfiniBand EDR")
    assert rows["a step alone"].startswith("100 ms, 16.78 MB of gradients, as the trace has them")
    exposed = float(rows["a step"].split(" exposed")[0].split()[-2])
    assert 0.3 < exposed < 10  # the last 4 MiB through 12.5 GB/s, at least
    assert float(rows["efficiency"].split("%")[0]) == pytest.approx(100 * 100 / (100 + exposed), abs=0.2)
    # Of 16 nodes one takes 1.1 times as long in almost every step.
    assert 88 < float(rows["with variation"].split("%")[0]) < 93

    # Two hosts of the user's own, with a link that takes 160 ms for 16 MiB.
    (tmp_path / "mine.xml").write_text(simulator.Platform("", 2, 0.1, 10.0).xml())
    done = _plan(
        *(tmp_path / "mine.xml", "--nodes", 2, "--step-ms", 10, "--parameters", 1 << 22),
        cache=cache,
    )
    assert done.returncode == 0, done
    rows = {line[:20].strip(): line[20:] for line in done.stdout.splitlines()}
    assert float(rows["a step"].split()[0]) == pytest.approx(10 + 168, rel=0.05)
    assert "with variation" not in rows
    done = _plan(
        *(tmp_path / "mine.xml", "--nodes", 3, "--step-ms", 10, "--parameters", 1 << 20),
        cache=cache,
    )
    assert "too few hosts. Expected 3 or more. Received: 2" in done.stderr
