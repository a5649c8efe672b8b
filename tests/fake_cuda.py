"""A GPU that is not there: device memory, streams and kernels of tests/native/fake_cuda.cpp, for ranks as threads."""

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

_SOURCES = Path(__file__).parent / "native"
_KEPT = Path(__file__).parent.parent / "build" / "tests"


def build(folder: Path, without: str = "") -> Path:
    """Compile libcuda.so.1 into a folder, or one that lacks a function."""
    options = ["-Wl,-soname,libcuda.so.1", *([f"-D{without}=not_there"] if without else [])]
    return _compile(["fake_cuda", "fake_cuda_controls", "fake_cuda_modules"], folder / "libcuda.so.1", *options)


def build_for_tensorflow(folder: Path) -> Path:
    """Compile a device of type "GPU" for TensorFlow into a folder."""
    found = importlib.util.find_spec("tensorflow")  # not imported: the process of the tests starts no framework
    assert found is not None
    assert found.submodule_search_locations is not None
    headers = f"{found.submodule_search_locations[0]}/include"
    return _compile(["fake_tensorflow_gpu"], folder / "fake_tensorflow_gpu.so", "-isystem", headers)


def build_nccl(folder: Path) -> Path:
    """Compile libnccl.so.2 into a folder, for processes that have loaded the fake driver."""
    return _compile(["fake_nccl"], folder / "libnccl.so.2", "-Wl,-soname,libnccl.so.2", "-lrt")


def build_nvrtc(folder: Path) -> Path:
    """Compile libnvrtc.so.12 into a folder, whose kernels the fake driver runs."""
    return _compile(["fake_nvrtc"], folder / "libnvrtc.so.12", "-Wl,-soname,libnvrtc.so.12")


def build_mpi(folder: Path) -> Path:
    """Compile an MPI library into a folder, whose calls can fail."""
    return _compile(["fake_mpi"], folder / "libfake_mpi.so")


def build_gpu_aware_mpi(folder: Path) -> Path:
    """Compile an MPI library into a folder, the one of this environment, which takes memory of the fake driver."""
    mpich = ["-Wl,--no-as-needed", f"-L{sys.prefix}/lib", "-l:libmpi.so.12"]
    return _compile(["fake_gpu_mpi"], folder / "libfake_gpu_mpi.so", *mpich)


@functools.cache
def nccl() -> ctypes.CDLL:
    """Load it into this process: the engine, which asks for a library of that name, then gets this one."""
    driver()
    with tempfile.TemporaryDirectory() as folder:
        fake = ctypes.CDLL(str(build_nccl(Path(folder))))
    fake.fake_nccl_fail.argtypes = [ctypes.c_char_p, ctypes.c_int]
    fake.fake_nccl_calls.argtypes = [ctypes.c_char_p]
    return fake


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """Load it into this process: the engine, which asks for a library of that name, then gets this one."""
    driver()
    with tempfile.TemporaryDirectory() as folder:
        fake = ctypes.CDLL(str(build_nvrtc(Path(folder))))
    fake.fake_nvrtc_fail.argtypes = fake.fake_nvrtc_calls.argtypes = [ctypes.c_char_p]
    return fake


def _compile(names: list[str], library: Path, *options: str) -> Path:
    """Copy a library to where a test wants it. It is compiled once for all tests, into build/tests."""
    command = ["g++", "-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *options]
    sources = [_SOURCES / f"{name}.cpp" for name in names]
    parts = [*map(str.encode, command), *(path.read_bytes() for path in sorted(_SOURCES.iterdir()) if path.is_file())]
    kept = _KEPT / f"{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:16]}-{library.name}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            unfinished = kept.with_suffix(".unfinished")
            subprocess.run([*command, "-o", unfinished, *sources, "-lpthread"], check=True, timeout=120)
            unfinished.rename(kept)
    return Path(shutil.copy(kept, library))


@functools.cache
def driver() -> ctypes.CDLL:
    """Load it into this process: the engine, which asks for a library of that name, then gets this one."""
    with tempfile.TemporaryDirectory() as folder:
        fake = ctypes.CDLL(str(build(Path(folder))))
    fake.fake_stream.restype = ctypes.c_void_p
    fake.fake_allocate.restype = ctypes.c_uint64
    fake.fake_allocate.argtypes = [ctypes.c_size_t, ctypes.c_int]
    fake.fake_free.argtypes = [ctypes.c_uint64]
    fake.fake_hang.argtypes = [ctypes.c_void_p, ctypes.c_int]
    fake.fake_destroy_stream.argtypes = fake.fake_finish.argtypes = [ctypes.c_void_p]
    fake.fake_write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
    fake.fake_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]
    fake.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int]
    fake.fake_peek.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]
    fake.fake_copy_any.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    fake.fake_copy.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t]
    fake.fake_take_time.argtypes = [ctypes.c_void_p, ctypes.c_int]
    fake.fake_sites.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    fake.fake_ignore.argtypes = fake.fake_calls.argtypes = [ctypes.c_char_p]
    return fake


class Stream:
    """A stream of the caller's, as a framework has one."""

    def __init__(self) -> None:
        self.handle = driver().fake_stream()

    def take_time(self, milliseconds: int) -> None:
        """Queue a kernel that does nothing for a while."""
        driver().fake_take_time(self.handle, milliseconds)

    def close(self) -> None:
        """Do what it was given, and end."""
        driver().fake_destroy_stream(self.handle)


class Tensor:
    """An array in device memory, which only kernels on streams can touch."""

    def __init__(self, like: np.ndarray, device: int = 0) -> None:
        self.dtype, self.size, self.nbytes = like.dtype, like.size, like.nbytes
        self.address = driver().fake_allocate(like.nbytes, device)

    def write(self, stream: Stream, array: np.ndarray) -> None:
        """Queue a kernel that gives it values."""
        driver().fake_write(stream.handle, self.address, array.ctypes.data, self.nbytes)

    def read(self, stream: Stream) -> np.ndarray:
        """Return its values once the stream has come to it."""
        array = np.empty(self.size, self.dtype)
        driver().fake_read(stream.handle, array.ctypes.data, self.address, self.nbytes)
        return array

    def peek(self) -> np.ndarray:
        """Return its values as they are, whatever streams have still to do."""
        array = np.empty(self.size, self.dtype)
        driver().fake_peek(array.ctypes.data, self.address, self.nbytes)
        return array

    def copy_to(self, stream: Stream, other: "Tensor") -> None:
        """Queue a kernel that reads it."""
        driver().fake_copy(stream.handle, other.address, self.address, self.nbytes)

    def free(self) -> None:
        """Give the memory back."""
        driver().fake_free(self.address)
