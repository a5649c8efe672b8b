#!/bin/bash
# Measures this project on one GPU, with two ranks that share it: benchmarks/gpu/one_gpu.sh [FOLDER]. About 8 minutes.
#
# Needs keras_hpc installed (pip install '.[mpich]') with PyTorch or JAX for CUDA, or both, an mpiexec and a C++ compiler.
# FOLDER gets a line of JSON for each number, logs, and report.md, which it prints. It changes no setting of the GPU.
#   INTERPRETER  the command of Python    MPIEXEC  that of mpiexec      BACKENDS  "torch jax"
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

rm -f "$out"/*.jsonl "$out"/*.log "$out/times.json"
${CXX:-g++} -O2 -std=c++17 -Inative benchmarks/gpu/probe.cpp -o "$out/probe" -ldl -lpthread || exit
step probe 120 "$out/probe" ${tiny:+tiny}
step copies 60 $python -m benchmarks.gpu.staged copies ${tiny:+--mib 1 --steps 30}
step ranks 120 $(two) -m benchmarks.gpu.staged ranks ${tiny:+--steps 3 --largest 300000}

for backend in ${BACKENDS:-torch jax}; do
    export KERAS_BACKEND=$backend
    $python -c "import $backend" 2> "$out/$backend.log" || { echo "no $backend: see $out/$backend.log" >&2; continue; }
    timeout 120 $(two) -m keras_hpc doctor ${tiny:+--parameters 10000} > "$out/doctor-$backend.txt" 2>&1
    for model in ${tiny:+tiny} ${tiny:-resnet50 mlp}; do
        [ "$model" = 1 ] && continue
        size=(--model "$model" --batch 64 --steps 30 --kept "$out/times.json")
        [ "$model" = mlp ] && size=(--model mlp --batch 2048 --steps 60 --kept "$out/times.json")
        [ "$model" = tiny ] && size=(--model tiny --batch 8 --steps 3 --kept "$out/times.json")
        step "fit-$backend-$model-plain" 90 $python -m benchmarks.gpu.fit plain "${size[@]}"
        step "fit-$backend-$model-init" 90 $python -m benchmarks.gpu.fit init "${size[@]}"
        step "fit-$backend-$model-light" 120 $(two) -m benchmarks.gpu.fit light "${size[@]}"
    done
    step "fit-$backend-both" 120 $(two) -m benchmarks.gpu.fit both "${size[@]}"
    step "faults-$backend" 240 $python -m benchmarks.gpu.faults $(two)
done
if [ -s "$out/doctor-jax.txt" ]; then
    KERAS_BACKEND=jax XLA_FLAGS="${XLA_FLAGS:-} --xla_dump_to=$out/hlo" timeout 120 \
        $(two) -m benchmarks.gpu.fit both "${size[@]}" > /dev/null 2> "$out/hlo.log"
    step order 30 $python -m benchmarks.gpu.order "$out/hlo"
    rm -rf "$out/hlo"
fi
$python -m benchmarks.gpu.report "$out" | tee "$out/report.md"
