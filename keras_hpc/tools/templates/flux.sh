#!/bin/bash
# Flux: edit, then `flux batch job.sh`.
# flux: --job-name=@JOB@
@ACCOUNT@
@QUEUE@
# flux: --output={{name}}-{{id}}.txt
# flux: --time-limit=@MINUTES@m
# flux: --nodes=@NODES@
# flux: --exclusive

@ENVIRONMENT@

nodes=@NODES@
ranks_per_node=@RANKS@  # one for each GPU, or, on CPUs, one or a few (one for each NUMA domain is a good start)
cores=@CORES@          # of a rank: those of the node divided by its ranks

# One core of each rank is for its communication thread. init() limits the threads of TensorFlow and JAX itself.
export OMP_NUM_THREADS=$((cores > 1 ? cores - 1 : 1))

# Each rank keeps to its cores; a rank that fails ends the job. MPICH and Intel MPI need nothing more; for Open MPI add
# -o pmi=pmix (from flux-pmix). GPUs: --gpus-per-task=1 -o gpu-affinity=per-task.
flux run --nodes=$nodes --ntasks=$((nodes * ranks_per_node)) --cores-per-task=$cores \
    -o cpu-affinity=per-task@GPUS@ -o exit-on-error python @SCRIPT@
