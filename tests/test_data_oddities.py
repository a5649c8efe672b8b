"""Files that are odd, and how much of files is read: to open them, and by a cache that has no room for them."""

import os
import sys
import tarfile

import h5py
import ml_dtypes
import numpy as np
import pytest
import zarr

with pytest.MonkeyPatch.context() as meanwhile:
    meanwhile.setenv("KERAS_BACKEND", "numpy")
    for name in ("sklearn", "matplotlib", "torch", "tensorflow"):
        if name not in sys.modules:
            meanwhile.setitem(sys.modules, name, None)
    from test_data_files import add

    from keras_hpc.data import Dataset, files, open_store
    from keras_hpc.data.ahead import Ahead
    from keras_hpc.data.cache import Cache
    from keras_hpc.data.order import Order
    from keras_hpc.data.stores import chunks

X = np.random.default_rng(0).normal(size=(512, 2048)).astype("float32")  # 8 KiB a sample


def test_hdf5_that_lies_in_other_files_is_refused(tmp_path):
    """HDF5 would look for the other file in the one that it has, and find zeros."""
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["x"] = X
    layout = h5py.VirtualLayout(X.shape, "float32")
    layout[:] = h5py.VirtualSource(tmp_path / "source.h5", "x", X.shape)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("raw", X.shape, "f4", external=[(str(tmp_path / "raw"), 0, X.nbytes)])
        file["link"] = h5py.ExternalLink("source.h5", "x")
        file["own"] = X
    for field in ("virtual", "raw", "link"):
        with pytest.raises(ValueError, match=rf"\['{field}'\] in .*x\.h5 lie in other files"):
            open_store(tmp_path / "x.h5", (field,))
    np.testing.assert_array_equal(open_store(tmp_path / "x.h5", ("own",)).read(0, 9)["own"], X[:9])


def test_zarr_behind_a_link_is_no_zeros(tmp_path):
    zarr.save_array(tmp_path / "x.zarr", X)
    os.rename(tmp_path / "x.zarr" / "c", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "x.zarr" / "c")
    np.testing.assert_array_equal(open_store(tmp_path / "x.zarr").read(0, 512)["array"], X)


def test_a_pattern_goes_into_folders(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("0.npy", "a/1.npy", "a/b/2.npy"):
        np.save(tmp_path / name, X[:2])
    assert len(open_store(tmp_path / "**" / "*.npy")) == 6


def test_other_orders_of_bytes(tmp_path):
    np.save(tmp_path / "x.npy", X.astype(">f4"))
    batch = Dataset(tmp_path / "x.npy", 8, shuffle=False)[0]  # PyTorch and JAX take no other
    assert batch.dtype == np.dtype("float32")
    np.testing.assert_array_equal(batch, X[:8])


def test_values_that_are_no_numbers_need_decode(tmp_path):
    values = X.astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "x.npy", values)
    with pytest.raises(ValueError, match=r"'array' in .*x\.npy are no numbers.*\|V2"):
        Dataset(tmp_path / "x.npy", 8)
    decoded = Dataset(
        tmp_path / "x.npy", 8, shuffle=False, decode=lambda found: found["array"].view(ml_dtypes.bfloat16)
    )
    np.testing.assert_array_equal(decoded[0], values[:8])


def write_members(path, members):
    with tarfile.open(path, "w") as archive:
        for name in members:
            add(archive, name, name.encode())


def test_what_is_no_part_of_a_sample_is_no_sample(tmp_path):
    write_members(tmp_path / "x.tar", ["README", "._a.x", "a.x", "._a.y", "a.y", ".DS_Store", "b.x", "b.y"])
    assert [sorted(sample) for sample in open_store(tmp_path / "x.tar").read(0, 2)] == [["x", "y"]] * 2
    assert len(open_store(tmp_path / "x.tar")) == 2


def test_tar_files_whose_samples_would_be_wrong_are_refused(tmp_path):
    for members, message in ((["a.x", "b.x", "a.y"], "a.y behind b"), (["a.x", "a.y", "a.x"], "a.x twice")):
        write_members(tmp_path / "x.tar", members)
        with pytest.raises(ValueError, match=message):
            open_store(tmp_path / "x.tar")
    for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE):
        with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as archive:
            add(archive, "a.x", b"1")
            member = tarfile.TarInfo("b.x")
            member.type, member.linkname = kind, "a.x"
            archive.addfile(member)
        with pytest.raises(ValueError, match=r"Received: b\.x, which is (a link to a\.x|sparse)"):
            open_store(tmp_path / "x.tar")


@pytest.fixture
def read_of(tmp_path):
    """Returns what part of a file some work reads, through a cache with a limit, or with none."""

    def measure(path, limit, work):
        cache = Cache(str(tmp_path), "test", limit, block_bytes=1 << 18) if limit else None
        files.use(cache)
        try:
            before = files.read_bytes()
            work()
            return (files.read_bytes() - before) / os.path.getsize(path)
        finally:
            files.use(None)
            if cache:
                cache.unlink()
                cache.close()

    return measure


def one_pass(data):
    for number in range(len(data)):
        data[number]


@pytest.mark.parametrize("limit", [None, 10**6, 10**8])
def test_a_file_is_read_once_though_the_cache_has_no_room(limit, read_of, tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, X)
    assert read_of(path, limit, lambda: one_pass(Dataset(path, 8, block=32, mixed=2))) < 1.05


@pytest.mark.parametrize("limit", [None, 10**6])
def test_a_chunk_is_read_once(limit, read_of, tmp_path, monkeypatch):
    """And not once for each of its rows that a batch takes."""
    monkeypatch.setattr(chunks, "_room", 0)
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=(32, 2048), compression="gzip", compression_opts=1)
    assert read_of(path, limit, lambda: one_pass(Dataset(path, 8, block=32, mixed=2))) < 1.2
    kept = sum(nbytes for _, nbytes in chunks._recent.values())
    assert kept <= chunks._room == 2 * 2 * 32 * 8192


def write_records(path, folder):
    if path.suffix == ".tar":
        with tarfile.open(path, "w") as archive:
            for row in range(40):
                add(archive, f"{row:03}.x", bytes(60_000))
                add(archive, f"{row:03}.y", b"1")
    else:
        tf = pytest.importorskip("tensorflow")
        with tf.io.TFRecordWriter(str(path)) as writer:
            for _ in range(40):
                writer.write(bytes(60_000))


@pytest.mark.parametrize("limit", [None, 10**8])
@pytest.mark.parametrize("ending", ["tar", "tfrecord"])
def test_opening_reads_headers_only(ending, limit, read_of, tmp_path):
    path = tmp_path / f"x.{ending}"
    write_records(path, tmp_path)
    assert read_of(path, limit, lambda: open_store(path)) < 0.1
    assert 60 < open_store(path).block < 80  # of about 4 MiB: neighbours are read together, as of other files


def test_the_next_window_is_brought_near(tmp_path):
    touched = []

    class Touched:
        def touch(self, start, stop):
            touched.append((start, stop))

    order = Order(100, "blocks", 10, 2, 0, 0)
    ahead = Ahead(Touched(), order, first=1000)
    with ahead.running():
        ahead.at(25)  # in the second of five windows
        deadline = 100
        while len(touched) < 4 and (deadline := deadline - 1):
            ahead._news.acquire()
            ahead._news.wait(0.05)
            ahead._news.release()
    blocks = {(start - 1000) // 10 for start, _ in touched}
    assert all(stop - start == 10 for start, stop in touched)
    assert blocks == set(order.at(20, 60) // 10)


@pytest.mark.parametrize("shuffle", ["blocks", False])
def test_windows_have_the_samples_that_come_in_them(shuffle):
    order = Order(53, shuffle, 4, 3, 0, 2)
    for place in range(53):
        inside = [range(*of_block) for of_block in order.ranges(order.window(place))]
        assert any(int(order.at(place, place + 1)[0]) in samples for samples in inside)
    assert order.ranges(order.window(52) + 1) == []
