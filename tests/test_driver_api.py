"""Our declarations of CUDA's driver are those of its own header, where that is here."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from launch import ROOT

HEAD = """
#include <%s>
#include <type_traits>
#include "device/nccl_api.hpp"
#include "device/nvrtc_api.hpp"
using namespace keras_hpc::device;

// What binary interfaces see: pointers are pointers, enumerations are int.
template <class T>
struct Seen {
  using type = std::conditional_t<std::is_pointer_v<T>, void*, std::conditional_t<std::is_enum_v<T>, int, T>>;
};
template <>
struct Seen<%s> {
  using type = %s;
};
template <class Function>
struct Signature;
template <class R, class... Arguments>
struct Signature<R(Arguments...)> {
  using type = typename Seen<R>::type(typename Seen<Arguments>::type...);
};
template <class A, class B>
constexpr bool same = std::is_same_v<typename Signature<A>::type, typename Signature<B>::type>;
#define TEXT(name) #name
#define SYMBOL(name) TEXT(name)  // macros of the header give a name the symbol that programs are linked to
constexpr bool equal(const char* a, const char* b) {
  while (*a != 0 && *a == *b) ++a, ++b;
  return *a == *b;
}
"""
VALUES = """
static_assert(kNotReady == CUDA_ERROR_NOT_READY && kInvalidValue == CUDA_ERROR_INVALID_VALUE && CUDA_SUCCESS == 0);
static_assert(kNonBlockingStream == CU_STREAM_NON_BLOCKING && kNoTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE && kDeviceMemory == CU_MEMORYTYPE_DEVICE);
static_assert(kDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(sizeof(Uuid) == sizeof(CUuuid) && sizeof(Pointer) == sizeof(CUdeviceptr));
static_assert(sizeof(MemoryHandle) == sizeof(CUipcMemHandle) && kLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(kMultiprocessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kMajorCapability == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kMinorCapability == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
"""


def _header(name: str, *packages: str) -> Path:
    """Where the toolkit or a wheel of it has a header."""
    roots = [Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    roots += [*sorted(Path("/usr/local").glob("cuda*/include"), reverse=True), Path("/usr/include")]
    wheels = importlib.util.find_spec("nvidia")
    for folder in wheels.submodule_search_locations or () if wheels else ():
        roots += [Path(folder) / package / "include" for package in packages]
    found = [root / name for root in roots if (root / name).is_file()]
    if not found:
        pytest.skip(f"there is no {name}")
    return found[0]


def _declared(table: Path, least: int = 10) -> list[tuple[str, str]]:
    """The symbol and type of each function of a table of ours."""
    text = re.sub(r"\s*\\\n\s*", " ", table.read_text())
    rows = re.findall(r'X\(\w+, "(\w+)",\s+(.*?\))\)(?= X|\n)', text)
    assert len(rows) >= least
    return rows


def _check(
    folder: Path,
    header: Path,
    checks: list[str],
    theirs: str = "CUipcMemHandle",
    ours: str = "MemoryHandle",
    more: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    file = folder / "check.cpp"
    file.write_text(HEAD % (header, theirs, ours) + "\n".join(checks))
    system = [part for path in (header.parent, more) if path is not None for part in ("-isystem", str(path))]
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{ROOT}/native", *system, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_driver(tmp_path):
    header = _header("cuda.h", "cuda_runtime", "cu13")
    rows = _declared(ROOT / "native" / "device" / "api.hpp")
    checks = [VALUES]
    for symbol, kind in rows:
        name = re.sub(r"_v\d$", "", symbol)
        checks.append(f'static_assert(same<decltype({name}), {kind}>, "{symbol}");')
        checks.append(f'static_assert(equal(SYMBOL({name}), "{symbol}"), "symbol {symbol}");')
    done = _check(tmp_path, header, checks)
    assert done.returncode == 0, done.stderr
    # And it would see what does not fit.
    wrong = 'static_assert(same<decltype(cuMemcpyDtoHAsync), Result(void*, Pointer, int, StreamHandle)>, "wrong type");'
    old = 'static_assert(equal(SYMBOL(cuEventDestroy), "cuEventDestroy"), "old symbol");'
    done = _check(tmp_path, header, [*checks, wrong, old])
    assert "wrong type" in done.stderr
    assert "old symbol" in done.stderr


NCCL_VALUES = """
static_assert(ncclSuccess == 0 && kNcclInProgress == ncclInProgress && kNcclSum == ncclSum);
static_assert(kNcclInt32 == ncclInt32 && kNcclInt64 == ncclInt64 && kNcclFloat16 == ncclFloat16);
static_assert(kNcclFloat32 == ncclFloat32 && kNcclFloat64 == ncclFloat64 && kNcclBfloat16 == ncclBfloat16);
static_assert(kNcclScalarOnHost == ncclScalarHostImmediate && sizeof(NcclId) == sizeof(ncclUniqueId));
"""


def test_nccl(tmp_path):
    header, runtime = _header("nccl.h", "nccl"), _header("cuda_runtime.h", "cuda_runtime", "cu13").parent
    rows = _declared(ROOT / "native" / "device" / "nccl_api.hpp")
    checks = [NCCL_VALUES, *(f'static_assert(same<decltype({symbol}), {kind}>, "{symbol}");' for symbol, kind in rows)]
    done = _check(tmp_path, header, checks, "ncclUniqueId", "NcclId", runtime)
    assert done.returncode == 0, done.stderr
    wrong = 'static_assert(same<decltype(ncclCommAbort), Result(int)>, "wrong type");'
    assert "wrong type" in _check(tmp_path, header, [*checks, wrong], "ncclUniqueId", "NcclId", runtime).stderr


def test_nvrtc(tmp_path):
    header = _header("nvrtc.h", "cuda_nvrtc", "cu13")
    rows = _declared(ROOT / "native" / "device" / "nvrtc_api.hpp", 9)
    checks = [f'static_assert(same<decltype({symbol}), {kind}>, "{symbol}");' for symbol, kind in rows]
    done = _check(tmp_path, header, checks, "struct Nothing", "int")
    assert done.returncode == 0, done.stderr
    wrong = 'static_assert(same<decltype(nvrtcVersion), Result(int*)>, "wrong type");'
    assert "wrong type" in _check(tmp_path, header, [*checks, wrong], "struct Nothing", "int").stderr


def test_the_kernel(tmp_path):
    """CUDA's own compiler takes it, rounds products before they are added, and moves 16 bytes at once."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("there is no nvcc")
    text = (ROOT / "native" / "device" / "sum_kernel.hpp").read_text()
    (kernel,) = re.findall(r'R"\((.*?)\)";', text, re.DOTALL)
    (tmp_path / "sum.cu").write_text(kernel)
    command = [compiler, "-std=c++17", "-fmad=false", "-arch=sm_80", "-ptx", "-o", "sum.ptx", "sum.cu"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    code = (tmp_path / "sum.ptx").read_text()
    assert set(re.findall(r"\.entry (\w+)", code)) == {
        f"sum_{t}" for t in ("float16", "bfloat16", "float32", "float64")
    }
    assert not re.search(r"\bfma\.", code)
    assert set(re.findall(r"(?:ld|st)\.global\.(\w+)\.", code)) == {"v2", "v4"}
