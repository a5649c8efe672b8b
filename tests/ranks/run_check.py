"""What each rank of a check runs: `mpiexec -n N python tests/ranks/run_check.py SECONDS FOLDER check_x.py ...`.

Goes on as `python -m mpi4py -m pytest -x check_x.py ...`: under `-m mpi4py` a rank that fails aborts the job, and `-x`
keeps it from communicating after its first failure. Each rank writes to a file of its own in FOLDER.
"""

import os
import runpy
import sys
from pathlib import Path

seconds, folder, *checks = sys.argv[1:]
rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMIX_RANK") or "0"
log = os.open(Path(folder) / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(log, 1)
os.dup2(log, 2)
# A rank that hangs shows where, shortly before the launcher's own limit ends the job. Of pytest's plugins only the one
# that does it: another imports for seconds, on every rank.
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
options = ["-p", "pytest_timeout", f"--timeout={seconds}"]
options += ["-x", "-v", "--durations=0", "--durations-min=0.3", "-p", "no:cacheprovider", "--tb=short"]
if os.environ["KERAS_BACKEND"] == "jax":
    import jax

    # init() makes it forget what it has compiled: half of the time of these tests would be compiling the same again. A
    # rank has a folder of its own, as JAX also reads what another one has not yet written whole.
    jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled{rank}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
if os.environ.get("TESTS_FAKE_GPU"):
    sys.path.append(str(Path(__file__).parent))
    options += ["-p", "fake_gpu"]
# Folders of its own: ranks that share them remove those of earlier runs at the same time, and trip over each other.
options.append(f"--basetemp={folder}/folders{rank}")
sys.argv[1:] = ["-m", "pytest", *options, *checks]
sys.path[0] = str(Path.cwd())
runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
