#!/bin/bash
# Measures this project on one GPU, with two ranks that share it: benchmarks/gpu/one_gpu.sh [FOLDER]. About 8 minutes.
#
# Needs keras_hpc installed (pip install --editable '.[mpich]') with PyTorch or JAX for CUDA, or both, an mpiexec and a C++ compiler.
# FOLDER gets a line of JSON for each number, logs, and report.md, which it prints. It changes no setting of the GPU.
#   INTERPRETER  the command of Python    MPIEXEC  that of mpiexec      BACKENDS  "torch jax"
#   PARTS  some of "engine mlp resnet50 doctor order faults"
#   TINY=1  sizes that prove nothing, to see that all of it runs
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit
out=$(mkdir -p "${1:-results/gpu}" && cd "${1:-results/gpu}" && pwd) || exit
python=${INTERPRETER:-python}
mpiexec=${MPIEXEC:-$(command -v mpiexec || echo "$(dirname "$(command -v python)")/mpiexec")}
tiny=${TINY:-}

# step NAME SECONDS COMMAND...: its lines to FOLDER/NAME.jsonl, the rest to FOLDER/NAME.log. What fails does not end the rest.
step() {
    local name=$1 limit=$2
    shift 2
    timeout -k 10 "$limit" "$@" > "$out/$name.jsonl" 2> "$out/$name.log" || echo "$name failed ($?): see $out/$name.log" >&2
}
two() { echo "$mpiexec -n 2 $python"; }

is_asked() { [[ " ${PARTS:-engine mlp resnet50 doctor order faults} " == *" $1 "* ]]; }

rm -f "$out"/*.jsonl "$out"/*.log "$out/times.json"
if is_asked engine; then
    ${CXX:-g++} -O2 -std=c++17 -Inative benchmarks/gpu/probe.cpp -o "$out/probe" -ldl -lpthread || exit
    step probe 60 "$out/probe" ${tiny:+tiny}
    step copies 60 $python -m benchmarks.gpu.staged copies ${tiny:+--mib 1 --steps 30}
    for threads in 1 4; do
        step "ranks-$threads" 90 $(two) -m benchmarks.gpu.staged ranks --threads $threads --steps 50 \
            ${tiny:+--steps 3 --largest 300000}
    done
    step nccl 60 $(two) -m benchmarks.gpu.direct nccl ${tiny:+--steps 3 --largest 40000}
    step peer 60 $(two) -m benchmarks.gpu.direct peer ${tiny:+--steps 3 --largest 40000}
fi

backends=
for backend in ${BACKENDS:-torch jax}; do
    if $python -c "import $backend" 2> "$out/$backend.log"; then backends+=" $backend"; else echo "no $backend: see $out/$backend.log" >&2; fi
done
for model in mlp resnet50; do
    is_asked $model || continue
    case $model$tiny in
        mlp) size=(--model mlp --batch 2048 --steps 40) ;;
        resnet50) size=(--model resnet50 --batch 64 --steps 20) ;;
        mlp1) size=(--model tiny --batch 8 --steps 3) ;;
        *) continue ;;
    esac
    for KERAS_BACKEND in $backends; do
        export KERAS_BACKEND
        for mode in plain init; do
            step "fit-$KERAS_BACKEND-$model-$mode" 90 $python -m benchmarks.gpu.fit $mode "${size[@]}" --kept "$out/times.json"
        done
        step "fit-$KERAS_BACKEND-$model-light" 120 $(two) -m benchmarks.gpu.fit light "${size[@]}" --kept "$out/times.json"
    done
done
for KERAS_BACKEND in $backends; do
    export KERAS_BACKEND
    is_asked doctor && timeout 120 $(two) -m keras_hpc doctor ${tiny:+--parameters 10000} > "$out/doctor-$KERAS_BACKEND.txt" 2>&1
    is_asked order && [ "$KERAS_BACKEND$tiny" = jax ] && step order 60 $python -m benchmarks.gpu.order
    is_asked faults && step "faults-$KERAS_BACKEND" 240 $python -m benchmarks.gpu.faults $(two)
done
$python -m benchmarks.gpu.report "$out" | tee "$out/report.md"
