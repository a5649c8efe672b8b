"""Runs idioms one after another in one job: `mpiexec -n N python tests/idioms/run_idioms.py FOLDER idiom.py ...`.

An idiom is a script with `main()`, which returns numbers and models. Each is a job of its own for keras_hpc, from
`init(**INIT)` to `finalize()`; models among the results must be the same on all ranks. Each rank writes what came out
into FOLDER/NAME.RANK.json: `{"results": ...}` or `{"error": traceback}`. An idiom without such files was not begun.
"""

import gc
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path

import keras
import numpy as np
from mpi4py import MPI

import keras_hpc

OPTIONS = {"batch": "global", "timeout_seconds": 30}
COMM = MPI.COMM_WORLD


def as_numbers(value):
    """What JSON holds: of a model how large each of its weights is."""
    if isinstance(value, keras.Layer):
        return [float(np.abs(np.asarray(weight, "float64")).sum()) for weight in value.get_weights()]
    if isinstance(value, dict):
        return {name: as_numbers(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_numbers(inner) for inner in value]
    if type(value).__module__.startswith(("torch", "tensorflow", "jax", "keras")):
        value = keras.ops.convert_to_numpy(value)
    return np.asarray(value, "float64").tolist()


def run(path):
    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    script = load(path)
    keras_hpc.init(**OPTIONS | getattr(script, "INIT", {}))
    results = script.main()
    for value in results.values():
        for model in value if isinstance(value, list) else [value]:
            if isinstance(model, keras.Layer):
                keras_hpc.check_replicas(model)
    results = {name: as_numbers(value) for name, value in results.items()}
    keras_hpc.finalize()
    return results


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome_of(path, folder):
    begin = time.perf_counter()
    os.makedirs(folder / path.stem, exist_ok=True)
    os.chdir(folder / path.stem)  # what a script writes
    try:
        outcome = {"results": run(path)}
    except Exception as error:  # noqa: BLE001
        outcome = {"error": traceback.format_exc(), "goes_on": not isinstance(error, keras_hpc.CommunicationError)}
    return outcome | {"seconds": time.perf_counter() - begin}


def main():
    folder = Path(sys.argv[1])
    keras.config.disable_interactive_logging()
    for path in map(Path, sys.argv[2:]):
        file = folder / f"{path.stem}.{COMM.rank}.json"
        file.write_text(json.dumps({"error": "the job ended while this was running"}))
        outcome = outcome_of(path, folder)
        file.write_text(json.dumps(outcome))
        # Ranks that fail alike can go on. Where one fails alone, the others wait for it until their time is over.
        everyone = COMM.allgather(outcome)
        if any("error" in other for other in everyone):
            if not all(other.get("goes_on") for other in everyone):
                COMM.Abort(1)
            keras_hpc.finalize()
        gc.collect()


if __name__ == "__main__":
    main()
