# SPDX-License-Identifier: Apache-2.0
"""Showers a second on one core: by Geant4, by the parametrisation, and by the generator, which need not be trained.

python -m examples.gan3d.speed

Electrons of 10 to 100 GeV, evenly spread, as those that the networks are trained on. Geant4 needs the extra `geant4`.
It tells Python of each step in silicon; it is measured without that, too, as a program in C++ would do it.
"""

import argparse
import os
import time

import numpy as np

from examples.launch import ENVIRONMENT

ENERGIES_GEV = (10.0, 100.0)


def rate(generate, count, seconds):
    """Returns how many showers a second a function makes.

    Args:
        generate: makes as many showers as it is given energies, in GeV.
        count: showers of a call.
        seconds: how long it is measured, at least; a first call does not count.
    """
    rng = np.random.default_rng(1)
    generate(rng.uniform(*ENERGIES_GEV, count))
    made, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        generate(rng.uniform(*ENERGIES_GEV, count))
        made += count
    return made / (time.perf_counter() - begin)


def markdown(rates, base):
    """Returns a table of Markdown: showers a second, and how many times as many as `base` makes.

    Args:
        rates: of each way, a number for each size of images.
        base: one of the ways.
    """
    sizes = list(rates[base])
    lines = [
        f"| showers a second | {' | '.join(f'{size} x {size} x {size} cells' for size in sizes)} |",
        f"|---|{'---:|' * len(sizes)}",
    ]
    for way, found in rates.items():
        cells = [f"{found[size]:,.3g} ({found[size] / rates[base][size]:,.3g} x)" for size in sizes]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement (default: 20)")
    parser.add_argument("--batch-size", type=int, default=64, help="of the generator (default: 64)")
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ.update(ENVIRONMENT)

    from examples.gan3d import geant4, gflash, networks

    presets = {preset.size: preset.name for preset in networks.PRESETS.values()}
    rng = np.random.default_rng(1)
    rates = {}
    for way, tells in (("Geant4, which tells Python of its steps", True), ("Geant4 alone", False)):
        geant4.tell_steps(tells)
        rates[way] = {
            size: rate(lambda energies, size=size: geant4.generate(rng, energies, size), 1, args.seconds)
            for size in presets
        }
    rates["parametrisation"] = {
        size: rate(lambda energies, size=size: gflash.generate(rng, energies, size), args.batch_size, args.seconds)
        for size in presets
    }
    generators = {}
    for size, preset in presets.items():
        generators[size] = networks.generator(preset)
        generators[size].compile(jit_compile=networks.use_xla())
    rates["generator"] = {
        size: rate(lambda energies, model=model: networks.generate(model, rng, energies), args.batch_size, args.seconds)
        for size, model in generators.items()
    }
    print(markdown(rates, "Geant4 alone"))
    return rates


if __name__ == "__main__":
    main()
