"""MPICH starts over a network whose addresses get through Slurm's pmi2, without any variable from the user."""

import pytest

pytestmark = pytest.mark.mpi

CHOSEN = "MPICH starts over OFI (MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=^sockets): "
STARTED = "MPI was started before keras_hpc.init(), "
CHOICE = "ofi, which init() has chosen: "
# What srun's pmi2 says to a rank on the first of two hosts, said to ranks of mpiexec: here UCX gets through.
AS_BY_PMI2 = """
import os
os.environ |= {"SLURM_MPI_TYPE": "pmi2", "SLURM_STEP_NUM_NODES": "2"}
del os.environ["MPI_LOCALRANKID"]
from keras_hpc.job import mpich_network as n
"""
REPORT = """
import os, sys
from mpi4py import MPI
from keras_hpc.job import mpich_network as n
mine = [name for name in os.environ if name.endswith("_CH4_NETMOD") or name == "FI_PROVIDER"]
sys.stdout.write(f"{MPI.COMM_WORLD.allreduce(1)} ranks over {n.describe(MPI)}; set: {mine}\\n{n.hint(MPI)}\\n")
"""


def test_after_tensorflow_on_two_hosts(slurm, tmp_path):
    """With a framework in memory an MPICH over UCX crashes or hangs in MPI_Init."""
    (tmp_path / "train.py").write_text(f"import tensorflow, keras_hpc\nkeras_hpc.init()\n{REPORT}")
    command = "srun --mpi=pmi2 -N2 -n2 python train.py"
    output = slurm(2, command, env={"KERAS_BACKEND": "tensorflow"}).output
    assert output.count(CHOSEN) == 1, "on rank 0"
    assert output.count(f"2 ranks over {CHOICE}") == 2, output
    assert output.count("; set: []\n") == 2, "the environment is the user's again"


def test_what_the_user_has_set_stays(slurm, tmp_path):
    """So does what works: ranks of one host need no addresses, and mpiexec has lines that are long enough."""
    (tmp_path / "start.py").write_text(f"import keras_hpc.job.launch as l\nl.connect(None)\n{REPORT}")
    commands = [
        "MPIR_CVAR_CH4_NETMOD=ofi srun --mpi=pmi2 -N2 -n2 python start.py",
        "srun --mpi=pmi2 -N1 -n2 python start.py",
        "mpiexec -n 2 python start.py",
    ]
    output = slurm(2, f"salloc -N2 --ntasks-per-node=2 bash -c '{' && '.join(commands)}'").output
    own = "2 ranks over ofi, as MPIR_CVAR_CH4_NETMOD says; set: ['MPIR_CVAR_CH4_NETMOD']\n"
    assert output.count(own) == 2, output
    assert output.count("2 ranks over ucx, the first of what this MPICH has: ucx, ofi; set: []\n") == 4, output
    assert CHOSEN not in output


@pytest.mark.parametrize(
    ("code", "said", "unsaid", "over"),
    [
        ("n.import_mpi()", CHOSEN, STARTED, CHOICE),
        ("n.import_mpi(); n.import_mpi()", CHOSEN, STARTED, CHOICE),
        ("import mpi4py; mpi4py.rc.threads = False; n.import_mpi()", CHOSEN, STARTED, CHOICE),
        ("os.environ['FI_PROVIDER'] = 'tcp'; n.import_mpi()", "OFI (MPIR_CVAR_CH4_NETMOD=ofi): ", "^sockets", CHOICE),
        ("os.environ['MPICH_CH4_NETMOD'] = 'ucx'; n.import_mpi()", "", CHOSEN, "ucx, as MPICH_CH4_NETMOD says"),
        ("from mpi4py import MPI; n.import_mpi()", STARTED, CHOSEN, "ucx, the first of "),
    ],
    ids=["default", "again", "no-threads", "own-provider", "own-choice", "started-before"],
)
def test_what_is_said(code, said, unsaid, over, run_ranks):
    output = run_ranks(2, ["-c", f"{AS_BY_PMI2}\n{code}\n{REPORT}"], env={"PMI_DEBUG": "1"}).output
    assert output.count(said) == 1 or not said, "on rank 0"
    assert unsaid not in output
    assert output.count(f"2 ranks over {over}") == 2, output
    assert ("export MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=^sockets" in output) == (said == STARTED)
    assert output.count("MPICH_CH4_NETMOD=ucx: MPI_Init may fail or hang") == (2 if over.startswith("ucx, as") else 0)
    assert output.count("cmd=finalize_ack") == 2, "MPI ends in order, whoever has started it"
