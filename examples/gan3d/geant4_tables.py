# SPDX-License-Identifier: Apache-2.0
"""Data files for Geant4, computed: tungsten and silicon, electrons and photons only.

Geant4 downloads its tables. Its standard electromagnetic physics needs only two kinds of them for electrons and
photons: bremsstrahlung below 1 GeV and the photo-electric effect. Both are made here, from a formula and from the
cross sections in xraylib. They are not Geant4's: bremsstrahlung below about 2 MeV is the weakest part.
"""

import os
from pathlib import Path

import numpy as np

ELECTRON_MEV = 0.51099895
FINE_STRUCTURE = 1 / 137.035999
ALPHA_RADIUS2_MB = FINE_STRUCTURE * 79.4078  # alpha times the squared classical electron radius

# Geant4 asks for all of these when it starts, and opens only what the particles here need.
VARIABLES = (
    "G4LEDATA G4NEUTRONHPDATA G4LEVELGAMMADATA G4RADIOACTIVEDATA G4PARTICLEXSDATA G4PIIDATA G4REALSURFACEDATA "
    "G4SAIDXSDATA G4ABLADATA G4INCLDATA G4CHANNELINGDATA G4ENSDFSTATEDATA GEANT4_DATA_DIR"
).split()


def write(folder, elements=(14, 74)):
    """Write the tables of some elements and point Geant4 to them, before it is imported.

    Args:
        folder: an existing folder.
        elements: atomic numbers.

    Raises:
        ImportError: xraylib is missing.
    """
    folder = Path(folder)
    os.environ.update(dict.fromkeys(VARIABLES, str(folder)))
    (folder / "ENSDFSTATE.dat").write_text("1 1 0 - 1e38 1 0\n")
    for name in ("brem_SB", "livermore/phot_epics2014", "epics2017/phot"):
        (folder / name).mkdir(parents=True)
    for Z in elements:
        (folder / f"brem_SB/br{Z}").write_text(_bremsstrahlung_file(Z))
        photo = _photo_file(Z)
        for name in ("livermore/phot_epics2014", "epics2017/phot"):
            (folder / name / f"pe-cs-{Z}.dat").write_text(photo)
            for fit in ("low", "high"):  # one effective shell; a threshold of 1e9 MeV keeps the fit out of use
                (folder / name / f"pe-{fit}-{Z}.dat").write_text("1 1 1e9\n1e-3 0 0 0 0 0 0\n")


def bremsstrahlung(Z, kinetic, fraction):
    """Scaled cross section of screened Bethe and Heitler: beta^2 / Z^2 k dsigma/dk.

    Args:
        Z: atomic number.
        kinetic: kinetic energy T of the electron in MeV.
        fraction: photon energy k / T, shape `(n,)`.

    Returns:
        Millibarn, shape `(n,)`.
    """
    total = kinetic + ELECTRON_MEV
    photon = np.maximum(fraction * kinetic, 1e-9)
    left = np.maximum(total - photon, ELECTRON_MEV)
    screening = 136 * Z ** (-1 / 3) * ELECTRON_MEV * photon / (total * left)
    strong = 21.12 - 4.184 * np.log(screening + 0.952)
    phi1 = np.where(screening <= 1, 20.867 - 3.242 * screening + 0.625 * screening**2, strong)
    phi2 = np.where(screening <= 1, 20.029 - 1.930 * screening - 0.086 * screening**2, strong)
    a2 = (FINE_STRUCTURE * Z) ** 2
    coulomb = a2 * (1 / (1 + a2) + 0.20206 - 0.0369 * a2 + 0.0083 * a2**2 - 0.002 * a2**3)
    correction = 4 / 3 * np.log(Z) + (4 * coulomb if total > 50 else 0)
    electrons = np.log(1194 * Z ** (-2 / 3)) / (np.log(184.15 * Z ** (-1 / 3)) - coulomb)  # photons from the shell
    rest = left / total
    shape = (1 + rest**2) * np.maximum(phi1 - correction, 0) - 2 / 3 * rest * np.maximum(phi2 - correction, 0)
    beta2 = kinetic * (kinetic + 2 * ELECTRON_MEV) / total**2
    return beta2 * ALPHA_RADIUS2_MB * (1 + electrons / Z) * shape


def _bremsstrahlung_file(Z):
    ends = [0, 1e-5, 0.005, 0.01, 0.025], [0.925, 0.95, 0.97, 0.99, 0.995, 0.999, 1]
    fractions = np.concatenate([ends[0], np.arange(0.05, 0.91, 0.05), ends[1]])
    energies = np.logspace(-3, 4, 57)  # MeV
    rows = [np.maximum(bremsstrahlung(Z, T, fractions), 1e-4) for T in energies]
    lines = [_numbers(row) for row in (fractions, np.log(energies), *rows)]
    return "\n".join([f"0 {len(fractions)} {len(energies)}", *lines, ""])


def _photo_file(Z):
    try:
        import xraylib
    except ImportError as error:
        raise ImportError(
            "Geant4's photo-effect tables are made with xraylib. Install it: pip install xraylib"
        ) from error
    low = np.logspace(-3, np.log10(0.8), 300)  # MeV; xraylib knows no more
    high = np.logspace(np.log10(0.85), 5, 120)
    barn = np.array([xraylib.CSb_Photo(Z, 1e3 * energy) for energy in low])
    barn = np.concatenate([barn, barn[-1] * (low[-1] / high) ** 1.1])
    energies = np.concatenate([low, high])
    lines = [_numbers(pair) for pair in zip(energies, barn * energies**3, strict=True)]
    return "\n".join([f"{_numbers(energies[[0, -1]])} {len(energies)}", str(len(energies)), *lines, ""])


def _numbers(values):
    return " ".join(f"{value:.8g}" for value in values)
