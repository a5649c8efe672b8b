"""Builds programs of tests/native with the engine's own sources under a sanitizer of the compiler."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launch import MPIEXEC, ROOT

MPICC = MPIEXEC.parent / "mpicc"
NOT_ALONE = ("c_api.cpp", "stopwatch.cpp")  # of the engine, where there is no MPI


def build(folder: Path, program: str, sanitizers: str, *, mpi: bool = False, compiler: str = "g++") -> Path:
    """Compiles tests/native/`program`.cpp and the engine; two files at a time."""
    native = ROOT / "native"
    sources = [ROOT / "tests" / "native" / f"{program}.cpp"]
    for part in ("common", "algorithms", "engine", "transport", "mpi"):
        sources += (native / part).glob("*.cpp")
    if not mpi:
        sources = [s for s in sources if s.name not in (*NOT_ALONE, "library.cpp", "mpi_transport.cpp")]
    flags = ["-std=c++17", "-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-pthread"]
    flags += [
        "-fopenmp-simd",
        "-ffp-contract=off",
        "-Wno-unknown-warning-option" if compiler == "clang++" else "-Wno-tsan",
        f"-I{native}",
        f"-I{native / 'include'}",
    ]
    flags += ["-Wno-tsan"] if compiler == "g++" else []
    links = ["-ldl"]
    if mpi:
        shown = subprocess.run([MPICC, "-show"], check=True, capture_output=True, text=True).stdout.split()[1:]
        flags += [word for word in shown if word.startswith("-I")]
        links += [word for word in shown if not word.startswith("-I")]

    def compiled(source: Path) -> Path:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        subprocess.run([compiler, *flags, "-c", "-o", target, source], check=True, timeout=280)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    binary = folder / program
    subprocess.run([compiler, *flags, "-o", binary, *objects, *links], check=True, timeout=280)
    return binary


def has_compiler(name: str = "g++", sanitizers: str = "") -> bool:
    """Returns whether programs can be built here, with sanitizers: their libraries may be a package of their own."""
    if shutil.which(name) is None:
        return False
    flags = [f"-fsanitize={sanitizers}"] if sanitizers else []
    command = [name, *flags, "-x", "c++", "-o", os.devnull, "-"]
    return subprocess.run(command, input="int main() {}", text=True, capture_output=True, check=False).returncode == 0


def options() -> dict[str, str]:
    """The environment of a program under a sanitizer: the first finding ends it."""
    return {
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        # Leaks are not looked for: MPI keeps memory, and so does the engine for what MPI may still write to.
        "ASAN_OPTIONS": "halt_on_error=1:exitcode=66:detect_leaks=0:quarantine_size_mb=64",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # UCX, below MPICH, else locks in calls of memory, also in those that the C library makes when a thread has
        # ended. ThreadSanitizer has forgotten the thread by then: a segmentation fault of any program.
        "UCX_MEM_EVENTS": "no",
        "UCX_MEM_MMAP_HOOK_MODE": "none",
        "PATH": os.environ["PATH"],
    }
