"""Python with a GPU that is not there: `on_fake_gpu.py -m MODULE ...` or `-c CODE`, as the interpreter takes them.

What trains, and doctor, find Keras' tensors on it (fake_gpu.py); others see it through the driver alone.
"""

import ctypes
import os
import runpy
import sys
from pathlib import Path

kind, what, *arguments = sys.argv[1:]
for library in ("TESTS_FAKE_GPU", "TESTS_FAKE_NVRTC"):
    ctypes.CDLL(os.environ[library])
sys.path[0] = str(Path.cwd())
sys.argv = [what, *arguments]
if kind == "-c":
    exec(what)
else:
    if what in ("benchmarks.gpu.fit", "keras_hpc") or arguments[:1] == ["rank"]:
        sys.path.append(str(Path(__file__).parent))
        import fake_gpu

        if arguments[:1] != ["plain"]:
            fake_gpu.pytest_configure(None)
    runpy.run_module(what, run_name="__main__", alter_sys=True)
