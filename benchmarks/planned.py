# SPDX-License-Identifier: Apache-2.0
"""Steps of models in parts beside what `python -m keras_hpc plan --spatial` expects of them.

    python -m benchmarks.planned --size 512
    mpiexec -n 2 python -m benchmarks.planned --size 512 --parts 2
    KERAS_BACKEND=jax mpiexec -n 4 python -m benchmarks.planned --size 256 --parts 4 --network unet

All ranks compute each sample together, by a network of examples/mesh. Steps of the job and rehearsed ones, in which
each rank computes its part without the others' rows, take turns, so both meet the machine as it is then. Expected is
what was rehearsed and what messages cost. Each rank computes with one thread. CPU is what the first rank computes in a
step: what is missing is a wait, for other ranks or for a core.
"""

import argparse
import contextlib
import os
import time

import numpy as np

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC") if name not in os.environ}

FILTERS = {"stack": 16, "unet": 8}  # of the first convolution, as in the example


def main():
    """Print a line of medians, on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=list(FILTERS), default="stack")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--parts", type=int, default=1, help="of each sample, as many as ranks (default: 1)")
    parser.add_argument("--pairs", type=int, default=15, help="of steps (default: 15)")
    arguments = parser.parse_args()

    import keras

    import keras_hpc
    from examples.mesh import train
    from keras_hpc.spatial.geometry import Grid
    from keras_hpc.tools import plan, plan_spatial, rehearsal
    from keras_hpc.tools.alone import standing_in

    keras_hpc.init(spatial=arguments.parts)
    grid, backend = Grid((arguments.parts,)), keras.backend.backend()

    def step():
        network = getattr(train, arguments.network)(arguments.size, FILTERS[arguments.network], depth=2)
        return rehearsal.step_of(network, batch_size=1), network

    measured, network = step()
    messages = 0.0
    if arguments.parts > 1:
        link = plan_spatial.link_of(plan.Network(between_gb_per_s=np.inf), is_inside=True)
        messages = link.seconds(*keras_hpc.partition(network).messages(1))
    with standing_in(grid, keras_hpc.rank()) if arguments.parts > 1 else contextlib.nullcontext():
        pairs = np.array(list(timed((step()[0], measured), arguments.pairs)))
    if keras_hpc.rank() == 0:
        pairs[:, 0, 0] += messages
        (expected, cpu), (took, own_cpu) = 1e3 * np.median(pairs, axis=0)
        ratios = pairs[:, 0, 0] / pairs[:, 1, 0]
        low, high = np.percentile(ratios, (10, 90))
        print(
            f"{backend}, {arguments.network}, {arguments.size} x {arguments.size}, ranks {arguments.parts}: "
            f"expected {expected:.0f} ms (CPU {cpu:.0f}), measured {took:.0f} ms (CPU {own_cpu:.0f}); "
            f"expected / measured {np.median(ratios):.2f} ({low:.2f} to {high:.2f}), messages {1e3 * messages:.1f} ms",
            flush=True,
        )


def timed(steps, count):
    """Yield seconds and CPU seconds of each step, so many times one after the other."""
    from keras_hpc.job import current

    for number in range(count + 2):
        found = []
        for step in steps:
            current.job().teams[0].barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            step()
            found.append((time.perf_counter() - begin, time.process_time() - begin_cpu))
        if number >= 2:  # functions and exchanges are made in the first ones
            yield found


if __name__ == "__main__":
    main()
