# SPDX-License-Identifier: Apache-2.0
"""What `make wheels` runs: a source archive, and a wheel for each Python that needs one of its own, in dist/.

MPI, TensorFlow, JAX and CUDA are found at run time, so that nothing has to be copied into a wheel: auditwheel must find
it clean as it is, for the platform that it is named after.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# 3.12 and later share one, by Python's stable ABI.
PYTHONS = ("python3.11", "python3.12")
# Older libraries than these need their own compiler: .github/workflows/release.yml builds in manylinux' image.
GLIBC = "2_34"
CROSS = {"aarch64": "aarch64-linux-gnu-g++"}


def main() -> int:
    """Build what this machine can, and say what it cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER", help="(default: dist)")
    parser.add_argument("--python", action="append", metavar="PROGRAM", help=f"(default: {', '.join(PYTHONS)})")
    parser.add_argument("--arch", choices=["all", os.uname().machine, *CROSS], default="all", help="(default: all)")
    parser.add_argument("--no-sdist", action="store_true", help="wheels only")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    pythons = [found for name in arguments.python or PYTHONS if (found := _works(name))]
    if not pythons:
        sys.exit(f"There is no Python to build a wheel for. Expected one of {', '.join(arguments.python or PYTHONS)}.")
    if not arguments.no_sdist:
        # Of what git knows: a source archive must not depend on what else lies around.
        _run([sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT])
    here = os.uname().machine
    if arguments.arch in ("all", here):
        for python in pythons:
            _check(_tag(_build(python, out / "building", {}), here, out))
    for arch, compiler in CROSS.items():
        if arguments.arch not in ("all", arch) or arch == here:
            continue
        if not shutil.which(compiler):
            print(f"no wheel for {arch}: there is no {compiler}", flush=True)
            continue
        newest = pythons[-1]
        if not _has_stable_abi(newest):
            print(f"no wheel for {arch}: that takes Python 3.12, whose extensions are not named after a machine")
            continue
        options = {"CMAKE_TOOLCHAIN_FILE": ROOT / "native" / "portable" / f"{arch}.cmake"}
        _check(_tag(_build(newest, out / "building", options, arch), arch, out))
    shutil.rmtree(out / "building", ignore_errors=True)
    return 0


def _works(name: str) -> str | None:
    """Return a Python's path, if it is there and starts: a shim of pyenv may name one that is not in use."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in [name, *sorted(pyenv.glob(f"*/bin/{name}"))]:
        if shutil.which(candidate):
            command = [candidate, "-c", "import sys; print(sys.executable)"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout.strip()
    print(f"no wheel for {name}: it is not here", flush=True)
    return None


def _has_stable_abi(python: str) -> bool:
    return (
        subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"], check=False).returncode == 0
    )


def _build(python: str, folder: Path, options: dict[str, object], arch: str = "") -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    words = [
        f"--config-settings=cmake.define.{name}={value}"
        for name, value in (options | {"KERAS_HPC_PORTABLE": "ON"}).items()
    ]
    words += [f"--config-settings=build-dir=build/wheels/{arch or os.uname().machine}-{{wheel_tag}}"]
    _run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, *words, ROOT])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _tag(wheel: Path, arch: str, out: Path) -> Path:
    """Name a wheel after the oldest libraries that it runs with."""
    command = [sys.executable, "-m", "wheel", "tags", "--remove", f"--platform-tag=manylinux_{GLIBC}_{arch}", wheel]
    name = _run(command, capture=True).strip().splitlines()[-1]
    return (wheel.parent / name).replace(out / name)


def _check(wheel: Path) -> None:
    """End with an error unless the wheel needs nothing but what its name promises."""
    said = _run([sys.executable, "-m", "auditwheel", "show", wheel], capture=True)
    found = re.search(r'platform tag:\s*"manylinux_(\d+)_(\d+)_(\w+)"', said)
    limit = tuple(map(int, GLIBC.split("_")))
    if not found or (int(found[1]), int(found[2])) > limit or found[3] not in wheel.name:
        sys.exit(f"{wheel.name} needs more than its name says:\n{said}")
    with zipfile.ZipFile(wheel) as file:
        libraries = [Path(name).name for name in file.namelist() if ".so" in name]
    print(f"{wheel.name}: {len(libraries)} libraries, needs glibc {found[1]}.{found[2]} at most", flush=True)


def _run(command: list[object], *, capture: bool = False) -> str:
    done = subprocess.run(
        list(map(str, command)), text=True, check=False, cwd=ROOT, stdout=subprocess.PIPE if capture else None
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout or ''}\nThis failed: {' '.join(map(str, command))}")
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
