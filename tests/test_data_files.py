"""Formats, orders and the cache of a node, in this process and in others that share the cache."""

import io
import multiprocessing
import os
import sys
import tarfile
import threading
import time

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

# Every worker imports this file: Keras without a framework, and without what it imports wherever it can.
with pytest.MonkeyPatch.context() as meanwhile:
    meanwhile.setenv("KERAS_BACKEND", "numpy")
    for name in ("sklearn", "matplotlib", "torch", "tensorflow"):
        if name not in sys.modules:
            meanwhile.setitem(sys.modules, name, None)
    from keras.src.trainers.epoch_iterator import EpochIterator

    from keras_hpc.data import Dataset, files, open_file
    from keras_hpc.data.cache import Cache
    from keras_hpc.data.order import Order
    from keras_hpc.data.staging import _bytes
    from keras_hpc.data.stores import crc32c, open_store

ROWS = 53
X = np.random.default_rng(0).normal(size=(ROWS, 3, 2)).astype("float32")
Y = np.arange(ROWS)


def write_hdf5(folder):
    for name, rows in (("a", slice(0, 20)), ("b", slice(20, ROWS))):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("group/x", data=X[rows], chunks=(7, 3, 2), compression="gzip")
            file["y"] = Y[rows]
            file["link"] = h5py.SoftLink("/y")
    return str(folder / "*.h5"), ("group/x", "link")


def write_npz(folder):
    np.savez(folder / "data.npz", x=X, y=Y, other=np.zeros(3))
    return folder / "data.npz", ("x", "y")


def write_compressed_npz(folder):
    np.savez_compressed(folder / "data.npz", x=X, y=Y)
    return folder / "data.npz", ("x", "y")


def write_zarr(folder):
    group = zarr.open_group(folder / "data.zarr", mode="w")
    group.create_group("inner").create_array("x", data=X, chunks=(5, 3, 2))
    group.create_array("y", data=Y, chunks=(5,))
    return folder / "data.zarr", ("inner/x", "y")


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_tar(folder):
    for name, rows in (("0", range(20)), ("1", range(20, ROWS))):
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            for row in rows:
                add(archive, f"part.1/{row:03}.x.bin", X[row].tobytes())
                add(archive, f"part.1/{row:03}.y", str(Y[row]).encode())
    return folder / "*.tar", None


def write_tfrecord(folder):
    tf = pytest.importorskip("tensorflow")
    with tf.io.TFRecordWriter(str(folder / "data.tfrecord")) as writer:
        for x, y in zip(X, Y, strict=True):
            writer.write(x.tobytes() + y.tobytes())
    return folder / "data.tfrecord", None


def of_tar(records):
    x = [np.frombuffer(record["x.bin"], "float32").reshape(3, 2) for record in records]
    return np.array(x), np.array([int(record["y"]) for record in records])


def of_tfrecord(records):
    x = [np.frombuffer(record[:24], "float32").reshape(3, 2) for record in records]
    return np.array(x), np.array([np.frombuffer(record[24:], "int64")[0] for record in records])


DECODE = {write_tar: of_tar, write_tfrecord: of_tfrecord}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("shuffle", ["blocks", "all", False])
@pytest.mark.parametrize(
    "write",
    [write_hdf5, write_npz, write_compressed_npz, write_zarr, write_tar, write_tfrecord],
    ids=lambda f: f.__name__,
)
def test_each_sample_comes_once_an_epoch(write, shuffle, cached, tmp_path, tmp_path_factory):
    paths, fields = write(tmp_path)
    cache = Cache(str(tmp_path_factory.mktemp("cache")), "test", 10**6, block_bytes=64) if cached else None
    files.use(cache)
    try:
        data = Dataset(paths, 8, fields=fields, decode=DECODE.get(write), shuffle=shuffle, block=5, mixed=3)
        assert len(data.store) == ROWS
        assert len(data) == 7
        orders = []
        for _ in range(2):
            batches = [data[number] for number in range(len(data))]
            assert [len(y) for _, y in batches] == [8] * 6 + [5]
            y = np.concatenate([y for _, y in batches])
            np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), X[y])
            np.testing.assert_array_equal(np.sort(y), Y)
            orders.append(list(y))
            data.on_epoch_end()
        assert (orders[0] == orders[1]) == (shuffle is False)
        assert (orders[0] == list(Y)) == (shuffle is False)
        data.set_epoch(1)
        np.testing.assert_array_equal(data[2][1], orders[1][16:24])
        np.testing.assert_array_equal(data.rows(2, 3, 6)[1], orders[1][19:22])
        if cached:
            before = cache.traffic()["read"]
            data.set_epoch(7)
            for number in range(len(data)):
                data[number]
            assert cache.traffic()["read"] == before  # all is on the node
            assert cache.traffic()["refused"] == 0
    finally:
        files.use(None)
        if cache:
            cache.close()


def test_a_pass_that_keras_reads_in_several_epochs_keeps_its_order(tmp_path):
    """Without a job: Keras says at the end of each of its epochs that one has ended."""
    np.save(tmp_path / "y.npy", Y)
    data = Dataset(tmp_path / "y.npy", 9, block=4)  # 6 batches
    steps = EpochIterator(data, steps_per_epoch=3)
    seen = np.concatenate([y for _ in range(4) for _, _, batches in steps for (y,) in batches])
    np.testing.assert_array_equal(np.sort(seen[:ROWS]), Y)
    np.testing.assert_array_equal(np.sort(seen[ROWS:]), Y)
    assert list(seen[:ROWS]) != list(seen[ROWS:])


def test_a_npy_file_is_read_by_rows(tmp_path):
    np.save(tmp_path / "x.npy", X)
    data = Dataset(tmp_path / "x.npy", 10, shuffle=False, samples=(3, 40))
    np.testing.assert_array_equal(np.concatenate([data[i] for i in range(len(data))]), X[3:40])


@given(
    st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3), st.integers(0, 59), st.integers(0, 60)
)
def test_places_of_an_order_are_those_of_the_whole(samples, block, mixed, epoch, start, length):
    order = Order(samples, "blocks", block, mixed, 5, epoch)
    whole = order.at(0, samples)
    assert sorted(whole) == list(range(samples))
    np.testing.assert_array_equal(order.at(start, start + length), whole[start : start + length])


def test_texts_of_any_length(tmp_path):
    texts = zarr.open_group(tmp_path / "x.zarr", mode="w").create_array("x", shape=(3,), dtype=str, chunks=(2,))
    texts[:] = np.array(["a", "bb", "ccc"])
    assert list(Dataset(tmp_path / "x.zarr", 5, shuffle=False)[0]) == ["a", "bb", "ccc"]


def test_shuffled_blocks_stay_near_each_other():
    order = Order(1000, "blocks", 10, 4, 0, 0).at(0, 40)
    assert len(set(order // 10)) == 4
    assert list(order) != sorted(order)


def read_all(folder, path, log, limit, order):
    cache = Cache(folder, "shared", limit, block_bytes=1000)
    original = files.Source.read_into

    def read_into(source, offset, view):
        time.sleep(0.005)  # so that processes meet
        with open(log, "a") as file:
            file.write(f"{offset} {len(view)}\n")
        original(source, offset, view)

    files.Source.read_into = read_into
    files.use(cache)
    whole = open_file(path)
    content = bytearray(whole.source.size)

    def part(begin):
        whole.read_at(begin, memoryview(content)[begin : begin + 700])

    threads = [threading.Thread(target=part, args=(begin,)) for begin in range(0, len(content), 700)[::order]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content == path.read_bytes()


def run_together(folder, path, log, limit):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=read_all, args=(folder, path, log, limit, o)) for o in (1, -1, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.parametrize("limit", [10**6, 5500])
def test_processes_of_a_node_read_each_block_once(limit, tmp_path):
    path, log = tmp_path / "data", tmp_path / "log"
    path.write_bytes(np.random.default_rng(0).bytes(30_300))
    cache = Cache(str(tmp_path), "shared", limit, block_bytes=1000)
    run_together(str(tmp_path), path, log, limit)
    read = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    traffic = cache.traffic()
    assert traffic["read"] == sum(nbytes for _, nbytes in read)
    if limit == 10**6:
        assert sorted(read) == [(begin, min(1000, 30_300 - begin)) for begin in range(0, 30_300, 1000)]
        assert traffic["kept"] == 30_300
    else:
        assert 4500 <= traffic["kept"] <= limit
        assert traffic["refused"] == traffic["read"] - traffic["kept"]
        assert traffic["refused"] <= 3 * (30_300 - 4500)  # of each process no more than it asked for
    cache.unlink()
    cache.close()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".keras_hpc")]


def test_a_file_that_changes_or_vanishes_is_named(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, X)
    data = Dataset(path, 10)
    np.save(path, X[:50])
    with pytest.raises(OSError, match=r"x\.npy has changed while the job reads it"):
        data[0]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"x\.npy"):
        data[0]
    zarr.save_array(tmp_path / "x.zarr", X)
    data = Dataset(tmp_path / "x.zarr", 10)
    for chunk in (tmp_path / "x.zarr").rglob("c/*/*/*"):
        chunk.unlink()
    with pytest.raises(FileNotFoundError, match=r"x\.zarr"):  # Zarr itself would read zeros
        data[0]


def test_a_full_disk_is_named(run_ranks, tmp_path):
    """A limit on the size of files stands for the disk: writing meets an error there, too."""
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(100_000))
    script = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from keras_hpc.data import Dataset, files
from keras_hpc.data.cache import Cache
files.use(Cache({str(tmp_path)!r}, "test", 10**9, block_bytes=10_000))
data = Dataset({str(path)!r}, 1000, shuffle=False)
data[0]
data[90]
"""
    done = run_ranks(1, ["-c", script], backend="torch", mpi=False, expect_failure=True)
    assert "while the node's cache was written" in done.output
    assert ".keras_hpc-test-data" in done.output


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: Dataset([], 3), r"no files to read"),
        (lambda folder: Dataset(folder / "none-*.h5", 3), r"No such file"),
        (lambda folder: Dataset(folder / "x.txt", 3), r"Expected one that ends in"),
        (lambda folder: Dataset(folder / "x.npy", 0), r"batch_size.*Received: batch_size=0"),
        (lambda folder: Dataset(folder / "x.npy", 3, ahead=0), r"ahead.*Received: ahead=0"),
        (lambda folder: Dataset(folder / "x.npy", 3, shuffle=True), r"shuffle=True"),
        (lambda folder: Dataset(folder / "empty.npy", 3), r"no samples to read.*Received: 0 in .*empty\.npy"),
        (lambda folder: Dataset(folder / "x.npz", 3, fields="label"), r"`fields` are names"),
        (lambda folder: Dataset(folder / "x.npz", 3, fields=("z",)), r"Expected fields among \['x', 'y'\]"),
        (lambda folder: Dataset(folder / "flipped.npz", 3), r"x in .*flipped\.npz cannot be read.*Bad CRC-32"),
        (lambda folder: Dataset(folder / "cut.tar", 3), r"cut\.tar is cut off"),
        (lambda folder: Dataset(folder / "x.npy", 3, samples=(0, 60)), r"start < stop <= 53"),
        (lambda folder: Dataset(folder / "x.npz", 3, fields=("x", "z")), r"has no \['z'\]"),
        (lambda folder: Dataset(folder / "x.npz", 3), r"equally many rows"),
        (lambda folder: Dataset(folder / "bad.h5", 3), r"Expected an HDF5 file"),
        (lambda folder: Dataset(folder / "bad.tar", 3), r"Expected a tar file"),
        (lambda folder: Dataset(folder / "bad.npz", 3), r"Expected a file of numpy.savez"),
        (lambda folder: Dataset(folder / "bad.tfrecord", 3), r"Expected whole records"),
        (lambda folder: Dataset(folder / "0.tar", 3), r"Records need `decode`"),
        (lambda folder: Dataset([folder / "x.npy", folder / "flat.npy"], 3), r"samples differ"),
        (lambda folder: Dataset(folder / "fortran.npy", 3), r"Fortran order"),
        (lambda folder: Dataset(folder / "short.npy", 3), r"short\.npy is cut off. Expected 1,400 bytes"),
    ],
)
def test_bad_input_is_named(make, message, tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "flat.npy", Y)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(X))
    np.savez(tmp_path / "x.npz", x=X, y=Y[:3])
    np.save(tmp_path / "empty.npy", X[:0])
    np.savez_compressed(tmp_path / "flipped.npz", x=X)
    content = bytearray((tmp_path / "flipped.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "flipped.npz").write_bytes(content)
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "short.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-1])
    write_tar(tmp_path)
    (tmp_path / "cut.tar").write_bytes((tmp_path / "0.tar").read_bytes()[: 20 * 2 * 1024])  # all members, but no end
    for ending in ("h5", "npz", "tar", "tfrecord"):
        (tmp_path / f"bad.{ending}").write_bytes(b"nonsense" * 100)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make(tmp_path)


@pytest.mark.parametrize("library", [True, False])
def test_a_flipped_bit_of_a_tfrecord_file_is_found(library, tmp_path, monkeypatch):
    """Without a library only those of lengths, and of their checksums."""
    path, _ = write_tfrecord(tmp_path)
    content = path.read_bytes()
    if not library:
        monkeypatch.setattr(crc32c, "google_crc32c", None)
    for position in range(48 if library else 12):  # of the first record: its length, its 32 bytes, their checksums
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"data\.tfrecord (is damaged|cannot be read)"):
            open_store(path).read(0, 1)
    path.write_bytes(content)
    assert open_store(path).read(0, 1) == [X[0].tobytes() + Y[0].tobytes()]


def test_a_damaged_header_is_not_the_end_of_a_tar_file(tmp_path):
    """To tarfile it is: samples behind it would be missing, and nobody would know."""
    write_tar(tmp_path)
    path = tmp_path / "0.tar"
    content = bytearray(path.read_bytes())
    assert len(open_store(path)) == 20
    content[10 * 2 * 1024 + 3] ^= 1  # in the name of the eleventh sample's first file
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"0\.tar is damaged\. Expected the header of a file"):
        open_store(path)


@pytest.mark.parametrize(("text", "nbytes"), [(5, 5), ("20GB", 20 * 10**9), ("1.5 MiB", 3 << 19), ("7k", 7000)])
def test_limits_are_numbers_of_bytes(text, nbytes):
    assert _bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "5 apples", -1, 0, True, "3I"])
def test_other_limits_are_refused(text):
    with pytest.raises(ValueError, match="limit="):
        _bytes(text)
