#!/bin/bash
# Slurm: edit, then `sbatch job.sh`.
#SBATCH --job-name=resnet50
#SBATCH --output=%x-%j.txt
#SBATCH --time=12:00:00
#SBATCH --nodes=32
# Ranks of a node: one for each GPU, or, on CPUs, one or a few (one for each NUMA domain is a good start).
#SBATCH --ntasks-per-node=2
# Cores of a rank: those of the node divided by its ranks.
#SBATCH --cpus-per-task=32
# A GPU for each rank, and the cores beside it: where a site binds them otherwise, init() chooses among all of a node
# (--gpus-per-node instead of these two).
##SBATCH --gpus-per-task=1
##SBATCH --gres-flags=enforce-binding
##SBATCH --exclusive
# With callbacks.Checkpoint (the signal ends other programs): into the queue again after preemption or the failure of a
# node, and by the end of this script when time is nearly over, of which SIGUSR1 warns the ranks 120 seconds before.
##SBATCH --requeue
##SBATCH --open-mode=append
##SBATCH --signal=USR1@120

# module load ...
# source /path/to/environment/bin/activate

# One core of each rank is for its communication thread. init() limits the threads of TensorFlow and JAX itself.
cores=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=$((cores > 1 ? cores - 1 : 1))
# A rank that fails ends the job, instead of leaving the others to wait for it.
export SLURM_KILL_BAD_EXIT=1

# What the ranks leave in the folder of their Checkpoint if they saved because of a signal.
interrupted=checkpoints/run/interrupted
rm -f "$interrupted"

# pmi2: MPICH and Intel MPI. pmix: Open MPI. cray_shasta: Cray MPICH. `srun --mpi=list` shows what your site has.
# `keras-hpc run -m examples.resnet50.train --data 'imagenet/train-*.h5' --tests 'imagenet/validation-*.h5' --classes 1000 --width 64 --epochs 100 --global-batch 8192 --flip --stage /tmp --checkpoints checkpoints/run` instead of this line finds out by itself.
srun --mpi=pmi2 --cpu-bind=cores --cpus-per-task="$cores" python -m examples.resnet50.train --data 'imagenet/train-*.h5' --tests 'imagenet/validation-*.h5' --classes 1000 --width 64 --epochs 100 --global-batch 8192 --flip --stage /tmp --checkpoints checkpoints/run
status=$?
if [ -e "$interrupted" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
