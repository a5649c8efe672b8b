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
GLIBC = (2, 34)  # a wheel that needs a newer one is refused
REQUIREMENTS = ROOT / "packaging" / "build-requirements.txt"
CROSS = {"aarch64": "aarch64-linux-gnu-g++"}


def main() -> int:
    """Build what this machine can, and say what it cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER", help="(default: dist)")
    parser.add_argument("--python", action="append", metavar="PROGRAM", help=f"(default: {', '.join(PYTHONS)})")
    parser.add_argument("--arch", choices=["all", os.uname().machine, *CROSS], default="all", help="(default: all)")
    parser.add_argument("--no-sdist", action="store_true", help="wheels only")
    parser.add_argument(
        "--root",
        type=Path,
        metavar="FOLDER",
        help="build in the system that packaging/debian11.sh has made there",
    )
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.root:
        _tag(_build_in(arguments.root.resolve()), os.uname().machine, out)
        return 0
    pythons = [found for name in arguments.python or PYTHONS if (found := _works(name))]
    if not pythons:
        sys.exit(f"There is no Python to build a wheel for. Expected one of {', '.join(arguments.python or PYTHONS)}.")
    if not arguments.no_sdist:
        # Of what git knows: a source archive must not depend on what else lies around.
        _run([sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT])
    here = os.uname().machine
    if arguments.arch in ("all", here):
        for python in pythons:
            _tag(_build(python, out / "building", {}), here, out)
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
        _tag(_build(newest, out / "building", options, arch), arch, out)
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
    words = [f"--config-settings=cmake.define.{name}={value}" for name, value in options.items()]
    words += [f"--config-settings=build-dir=build/wheels/{arch or os.uname().machine}-{{wheel_tag}}"]
    _run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, *words, ROOT])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _build_in(root: Path) -> Path:
    """Build a wheel in the system of a folder, for its Python; it needs no network there."""
    in_root = [ROOT / "packaging" / "in_root.sh", root]
    ours, theirs = root / "keras_hpc", "/keras_hpc"
    shutil.rmtree(ours, ignore_errors=True)
    for name in _run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture=True).split("\0"):
        if name and (ROOT / name).is_file():
            (ours / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, ours / "source" / name)
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = _run([*in_root, "/opt/python/bin/python", "-c", asked], capture=True).strip()
    download(version, ours / "wheels", ["--requirement", REQUIREMENTS])
    offline = f"pip {{}} --quiet --disable-pip-version-check --no-index --find-links {theirs}/wheels"
    commands = [
        f"/opt/python/bin/python -m venv {theirs}/venv",
        f". {theirs}/venv/bin/activate",
        f"{offline.format('install')} --requirement {theirs}/source/packaging/{REQUIREMENTS.name}",
        f"{offline.format('wheel')} --no-deps --no-build-isolation --wheel-dir {theirs}/built {theirs}/source",
    ]
    _run([*in_root, "sh", "-euc", "\n".join(commands)])
    (wheel,) = (ours / "built").glob("*.whl")
    return wheel


def download(version: str, folder: Path, what: list[object]) -> None:
    """Download wheels for another Python, that run with glibc 2.28.

    Args:
        version: of the Python, as "3.13".
        folder: where they go.
        what: names, wheels or options of pip.
    """
    machine = os.uname().machine
    # An old enough pip takes no newer name for an older one: all that are in use.
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(28, 16, -1)] + [f"manylinux2014_{machine}"]
    options = [f"--platform={name}" for name in platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", folder]
    _run([*command, "--only-binary=:all:", f"--python-version={version}", *options, *what])


def _tag(wheel: Path, arch: str, out: Path) -> Path:
    """Name a wheel after the oldest libraries that it runs with, and end with an error if they are too new."""
    # A cross compiler's is named after this machine, and auditwheel goes by the name.
    wheel = _rename(wheel, f"linux_{arch}")
    said = _run([sys.executable, "-m", "auditwheel", "show", wheel], capture=True)
    found = re.search(r'platform tag:\s*"(manylinux_(\d+)_(\d+)_(\w+))"', said)
    if not found or (int(found[2]), int(found[3])) > GLIBC or found[4] != arch:
        sys.exit(f"{wheel.name} needs newer libraries than glibc {'.'.join(map(str, GLIBC))}:\n{said}")
    wheel = _rename(wheel, found[1])
    with zipfile.ZipFile(wheel) as file:
        libraries = [Path(name).name for name in file.namelist() if ".so" in name]
    print(f"{wheel.name}: {len(libraries)} libraries, needs glibc {found[2]}.{found[3]} at most", flush=True)
    return Path(shutil.move(wheel, out / wheel.name))


def _rename(wheel: Path, platform: str) -> Path:
    command = [sys.executable, "-m", "wheel", "tags", "--remove", f"--platform-tag={platform}", wheel]
    return wheel.parent / _run(command, capture=True).strip().splitlines()[-1]


def _run(command: list[object], *, capture: bool = False) -> str:
    done = subprocess.run(
        list(map(str, command)), text=True, check=False, cwd=ROOT, stdout=subprocess.PIPE if capture else None
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout or ''}\nThis failed: {' '.join(map(str, command))}")
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
