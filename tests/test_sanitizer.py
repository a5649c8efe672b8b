"""Two teams at once under ThreadSanitizer: no data race, no deadlock."""

import os
import shutil
import subprocess

import pytest
from launch import ROOT


@pytest.mark.soak  # two minutes, most of them to compile
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_two_teams_at_once_have_no_data_race(tmp_path):
    sources = [*(ROOT / "native").glob("common/*.cpp"), *(ROOT / "native").glob("algorithms/*.cpp")]
    sources += [p for p in (ROOT / "native" / "engine").glob("*.cpp") if p.name not in ("c_api.cpp", "stopwatch.cpp")]
    sources += [
        ROOT / "native" / "transport" / f"{name}.cpp" for name in ("transport", "topology", "segment", "in_process")
    ]
    sources.append(ROOT / "tests" / "native" / "two_teams.cpp")
    program = tmp_path / "two_teams"
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-fsanitize=thread",
        "-pthread",
        "-I",
        ROOT / "native",
        "-I",
        ROOT / "native/include",
    ]
    subprocess.run(["g++", *flags, "-o", program, *sources], check=True, timeout=280)
    options = os.environ | {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    done = subprocess.run([program], env=options, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert done.stdout.count("done") == 9
