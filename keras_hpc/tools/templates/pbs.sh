#!/bin/bash
# PBS: edit, then `qsub job.sh`.
#PBS -N @JOB@
@ACCOUNT@
@QUEUE@
#PBS -j oe
#PBS -l walltime=@HH:MM:SS@
# mpiprocs: ranks of a node, one for each GPU, or, on CPUs, one or a few (one for each NUMA domain is a good start).
# ncpus: all cores of a node; they are shared among its ranks. GPUs: add :ngpus=1 for each rank.
#PBS -l select=@NODES@:ncpus=@NODE_CORES@:mpiprocs=@RANKS@@GPUS@
#PBS -l place=scatter:excl

cd "$PBS_O_WORKDIR" || exit
@ENVIRONMENT@

# The file names a host once for each of its ranks: a:2,b:2.
hosts=$(awk '!n[$1]++ { name[++k] = $1 } END { for (i = 1; i <= k; i++) printf "%s%s:%d", (i > 1 ? "," : ""), name[i], n[name[i]] }' "$PBS_NODEFILE")

# Hosts are reached by ssh. Where that is not allowed: export HYDRA_LAUNCHER_EXEC=pbs_tmrsh (MPICH),
# I_MPI_HYDRA_BOOTSTRAP_EXEC=pbs_tmrsh (Intel MPI), PRTE_MCA_plm_ssh_agent=pbs_tmrsh (Open MPI).
# Gives each rank its cores, and sets OMP_NUM_THREADS to their number less one for the communication thread. Where there
# is a GPU for each rank, it gets that, and the cores beside it.
python -m keras_hpc run --hosts "$hosts" @SCRIPT@
