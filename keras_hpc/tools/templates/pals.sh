#!/bin/bash
# PBS with HPE's PALS, as on Cray EX: edit, then `qsub job.sh`.
#PBS -N @JOB@
@ACCOUNT@
@QUEUE@
#PBS -j oe
#PBS -l walltime=@HH:MM:SS@
#PBS -l select=@NODES@:ncpus=@NODE_CORES@:mpiprocs=@RANKS@@GPUS@
#PBS -l place=scatter:excl

cd "$PBS_O_WORKDIR" || exit

# mpi4py finds Cray MPICH by its ABI, which is that of MPICH.
# module load cray-mpich-abi
export MPI4PY_LIBMPI=${MPI4PY_LIBMPI:-libmpi.so.12}
@ENVIRONMENT@

nodes=@NODES@
ranks_per_node=@RANKS@  # one for each GPU, or, on CPUs, one or a few (one for each NUMA domain is a good start)
cores=@CORES@          # of a rank: those of the node divided by its ranks

# One core of each rank is for its communication thread. init() limits the threads of TensorFlow and JAX itself.
export OMP_NUM_THREADS=$((cores > 1 ? cores - 1 : 1))

# init() gives each rank the GPU of its number on the node, if there are any.
mpiexec -n $((nodes * ranks_per_node)) --ppn $ranks_per_node --depth $cores --cpu-bind depth python @SCRIPT@
