"""What a rank of `keras_hpc run` takes: its GPU, and the cores beside it."""

import os

import pytest

from keras_hpc.tools import rank

INFORMATION = """Model: \t\t NVIDIA {model}
IRQ:   \t\t 22
GPU UUID: \t {uuid}
Bus Location: \t {bus}
Device Minor: \t {minor}
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node as Linux and NVIDIA's driver show one: two GPUs beside cores 0 to 3, two beside 4 to 7."""
    for name in ("gpus", "bus", "dev"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(rank, "_DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(rank, "_BUS", tmp_path / "bus")
    monkeypatch.setattr(rank, "_DEVICES", tmp_path / "dev")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is as it was when the test is over
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def add(bus, uuid, cores, model="H100", *, shown=True):
        minor = len(list((tmp_path / "gpus").iterdir()))
        (tmp_path / "gpus" / bus).mkdir()
        text = INFORMATION.format(model=model, uuid=uuid, bus=bus, minor=minor)
        (tmp_path / "gpus" / bus / "information").write_text(text)
        (tmp_path / "bus" / bus.lower()).mkdir()
        (tmp_path / "bus" / bus.lower() / "local_cpulist").write_text(cores + "\n")
        if shown:
            (tmp_path / "dev" / f"nvidia{minor}").touch()

    for number, cores in enumerate(["4-7", "4-7", "0-3", "0-1,2-3"]):
        add(f"0000:{number}B:00.0", f"GPU-{number}{number}", cores)
    return add


NEAR, FAR = frozenset(range(4)), frozenset(range(4, 8))


def test_each_rank_gets_a_gpu_and_the_cores_beside_it(node):
    assert rank._gpus(4) == [("GPU-00", FAR), ("GPU-11", FAR), ("GPU-22", NEAR), ("GPU-33", NEAR)]
    assert rank._gpus(3) == rank._gpus(4)[:3]
    assert rank._gpus(5) == [], "init() lets ranks share"
    beside = [cores for _, cores in rank._gpus(4)]
    assert rank._shares(range(8), 2, beside) == [[4, 5], [6, 7], [0, 1], [2, 3]]
    assert rank._shares(range(8), 3, beside[:2]) == [[4, 5, 6], [7, 0, 1]], "what is missing there is taken elsewhere"
    assert rank._shares(range(4), 2, [frozenset(), frozenset()]) == [[0, 1], [2, 3]]
    assert rank._shares([1, 5], 1, beside[2:]) == [[1], [5]]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("3,1", [("3", NEAR), ("1", FAR)]),
        ("GPU-2,GPU-11", [("GPU-2", NEAR), ("GPU-11", FAR)]),  # a UUID may be cut short
        ("9,0", [("9", frozenset()), ("0", FAR)]),
        ("MIG-1a,MIG-2b", [("MIG-1a", frozenset()), ("MIG-2b", frozenset())]),
        ("", []),
        ("-1", []),
        ("0", []),
        ("none,0", []),
    ],
)
def test_what_a_launcher_has_given_is_shared_out(visible, expected, node, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert rank._gpus(2) == expected


def test_what_is_not_known_is_left_to_init(node, tmp_path):
    (tmp_path / "gpus" / "0000:0B:00.0" / "information").write_text("?\n")
    assert [name for name, _ in rank._gpus(2)] == ["GPU-11", "GPU-22"]
    node("0000:4B:00.0", "GPU-44", "0", shown=False)
    assert len(rank._gpus(3)) == 3
    assert rank._gpus(4) == [], "one is another job's"
    node("0000:5B:00.0", "GPU-55", "0", model="T400")
    assert rank._gpus(2) == [], "which is the fastest?"


def test_a_rank_takes_them(node, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    taken = []
    monkeypatch.setattr(os, "execv", lambda *command: taken.append(command))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mine: taken.append(mine))
    monkeypatch.setattr("sys.argv", ["rank", "--pin", "--", "/bin/true"])
    for name, value in {"PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rank.main()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-11"
    assert taken[-1] == ("/bin/true", ["/bin/true"])
    assert len(cores) < 2 or len(taken[0]) == len(cores) // 2
