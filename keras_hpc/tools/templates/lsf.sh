#!/bin/bash
# LSF: edit, then `bsub < job.sh` (mind the <).
#BSUB -J @JOB@
#BSUB -o @JOB@-%J.txt
#BSUB -W @HH:MM@
@ACCOUNT@
@QUEUE@
# Slots of the job, and of each host: one for each core of each rank.
#BSUB -n @ALL_CORES@
#BSUB -R "span[ptile=@NODE_CORES@]"
#BSUB -x
@GPUS@

@ENVIRONMENT@

ranks_per_node=@RANKS@  # one for each GPU, or, on CPUs, one or a few (one for each NUMA domain is a good start)

# The file names a host once for each of its slots; some sites put a host in front that only runs this script.
hosts=$(awk -v ranks="$ranks_per_node" '!n[$1]++ { name[++k] = $1 }
    END { for (i = 1 + (k > 1 && n[name[1]] < n[name[2]]); i <= k; i++) printf "%s%s:%d", (c++ ? "," : ""), name[i], ranks }' \
    "$LSB_DJOB_HOSTFILE")

# Hosts are reached by ssh. Where that is not allowed: export HYDRA_LAUNCHER=lsf (MPICH), I_MPI_HYDRA_BOOTSTRAP=lsf
# (Intel MPI); an Open MPI with LSF's support needs nothing. Gives each rank its cores, and sets OMP_NUM_THREADS to their
# number less one for the communication thread. Where there is a GPU for each rank, it gets that.
python -m keras_hpc run --hosts "$hosts" @SCRIPT@
