# SPDX-License-Identifier: Apache-2.0
"""Showers of electrons and photons in the same calorimeter from Geant4, with tables of our own (see geant4_tables.py).

About 10 ms per GeV and core: 5,000 showers of 10 to 100 GeV take most of an hour.
"""

import importlib.util
import tempfile
from functools import cache

import numpy as np

from examples.gan3d import geant4_tables, gflash

if missing := [name for name in ("geant4_pybind", "xraylib") if importlib.util.find_spec(name) is None]:
    raise ImportError(
        "--source geant4 needs two more packages: pip install geant4-pybind xraylib. "
        f"Expected both. Received: no {' and no '.join(missing)}"
    )

LABEL = "Geant4 with our own bremsstrahlung (below 1 GeV) and photo-effect tables, not Geant4's data files"
GAP_MM = 1.30  # between tungsten and silicon; the rest of a layer's gaps comes behind the silicon
CUT_MM = 0.7  # Geant4's default range cut; 0.1 mm gives the same showers
HALF_WIDTH_MM = 300.0  # of the calorimeter; the image sees the middle of it

_PITCH_GAPS_MM = (gflash.DEPTH_MM - gflash.TUNGSTEN_MM.sum()) / gflash.LAYERS - gflash.SILICON_MM
_LAYER_BEGIN_MM = np.concatenate([[0], np.cumsum(gflash.TUNGSTEN_MM + gflash.SILICON_MM + _PITCH_GAPS_MM)])
_SILICON_BEGIN_MM = _LAYER_BEGIN_MM[:-1] + gflash.TUNGSTEN_MM + GAP_MM


PARTICLES = {"electron": "e-", "photon": "gamma"}  # and their names in Geant4


def parameters(particle="electron"):
    """What defines these showers, as a dictionary for a file's attributes."""
    names = ("particle", "layers", "tungsten_mm", "silicon_mm", "depth_mm")
    geometry = {name: value for name, value in gflash.parameters(particle).items() if name in names}
    return geometry | {
        "geant4": _simulation().version,
        "physics": "G4EmStandardPhysics_option1",
        "cut_mm": CUT_MM,
        "gap_before_silicon_mm": GAP_MM,
    }


def generate(rng, energies, size=25, particle="electron"):
    """Simulate one shower for each energy.

    Args:
        rng: a `numpy.random.Generator`; it gives Geant4 its seed.
        energies: primary energies in GeV, shape `(n,)`.
        size: 25 or 13, see `gflash.generate`.
        particle: of PARTICLES.

    Returns:
        Energy in silicon in GeV, float32 of shape `(n, size, size, size)`: event, x, y, layer.
    """
    simulation = _simulation()
    simulation.seed(int(rng.integers(1, 2**31 - 1)))
    half = size * gflash.CELL_MM[size] / 2
    edges = np.linspace(-half, half, size + 1)
    layer_edges = np.arange(size + 1) - 0.5
    images = np.empty((len(energies), size, size, size), np.float32)
    for image, energy in zip(images, energies, strict=True):
        x, y, z, deposit = simulation.shower(float(energy), particle)
        layer = np.searchsorted(_SILICON_BEGIN_MM, z + 1e-6, side="right") - 1
        if size == 13:
            layer //= 2
        image[:], _ = np.histogramdd((x, y, layer), bins=(edges, edges, layer_edges), weights=deposit)
    return images


def tell_steps(tells):
    """Let Geant4 tell of its steps in silicon, or not: showers are then simulated, but their images stay empty."""
    _simulation().tell_steps(tells)


@cache
def _simulation():
    """One per process: Geant4 cannot be started twice."""
    folder = tempfile.TemporaryDirectory(prefix="geant4-tables-")
    geant4_tables.write(folder.name)
    return _Simulation(folder)


class _Simulation:
    """A calorimeter in Geant4 that tells where silicon took energy.

    Args:
        folder: with the tables; kept, because Geant4 opens some of them only when it needs them.
    """

    def __init__(self, folder):
        import geant4_pybind as g4

        self._folder, self._g4, self._steps, self._kept = folder, g4, [], []
        self.version = f"{g4.G4VERSION_NUMBER // 100}.{g4.G4VERSION_NUMBER // 10 % 10}.{g4.G4VERSION_NUMBER % 10}"
        steps, build, make_gun = self._steps, self._build, self._make_gun
        silicon = []

        # Python overrides virtual functions only in subclasses, so the five roles are classes.
        class Sensor(g4.G4VSensitiveDetector):
            def Initialize(self, hits):
                steps.clear()

            def ProcessHits(self, step, history):
                deposit = step.GetTotalEnergyDeposit()
                if deposit > 0:
                    a, b = step.GetPreStepPoint().GetPosition(), step.GetPostStepPoint().GetPosition()
                    steps.append(((a.x + b.x) / 2, (a.y + b.y) / 2, (a.z + b.z) / 2, deposit))
                return True

            def EndOfEvent(self, hits):
                pass

        class Detector(g4.G4VUserDetectorConstruction):
            def Construct(self):
                return build(silicon)

            def ConstructSDandField(self):
                self.sensor = Sensor("silicon")
                g4.G4SDManager.GetSDMpointer().AddNewDetector(self.sensor)
                for volume in silicon:
                    volume.SetSensitiveDetector(self.sensor)

        class Physics(g4.G4VModularPhysicsList):
            def __init__(self):
                super().__init__()
                self.RegisterPhysics(g4.G4EmStandardPhysics_option1())
                self.SetDefaultCutValue(CUT_MM * g4.mm)

        class Beam(g4.G4VUserPrimaryGeneratorAction):
            def __init__(self):
                super().__init__()
                self.gun = make_gun()

            def GeneratePrimaries(self, event):
                self.gun.GeneratePrimaryVertex(event)

        class Actions(g4.G4VUserActionInitialization):
            def Build(self):
                self.SetUserAction(Beam())

        self._manager = g4.G4RunManagerFactory.CreateRunManager(g4.G4RunManagerType.Serial)
        for part in (Detector(), Physics(), Actions()):
            self._manager.SetUserInitialization(part)
        for command in ("/process/em/verbose 0", "/process/had/verbose 0", "/run/verbose 0"):
            g4.G4UImanager.GetUIpointer().ApplyCommand(command)
        self._manager.Initialize()

    def seed(self, value):
        self._g4.G4Random.setTheSeed(value)

    def tell_steps(self, tells):
        self._g4.G4SDManager.GetSDMpointer().Activate("silicon", tells)

    def shower(self, energy, particle):
        """Simulate a particle of PARTICLES, of `energy` GeV.

        Returns:
            (x, y, z, deposit) of the steps in silicon, each of shape `(steps,)`: three in mm, then GeV.
        """
        self._gun.SetParticleDefinition(self._g4.G4ParticleTable.GetParticleTable().FindParticle(PARTICLES[particle]))
        self._gun.SetParticleEnergy(energy * self._g4.GeV)
        self._manager.BeamOn(1)
        x, y, z, deposit = np.array(self._steps).reshape(-1, 4).T
        return x, y, z, deposit * self._g4.MeV / self._g4.GeV

    def _make_gun(self):
        g4 = self._g4
        self._gun = g4.G4ParticleGun(1)
        self._gun.SetParticleMomentumDirection(g4.G4ThreeVector(0, 0, 1))
        self._gun.SetParticlePosition(g4.G4ThreeVector(0, 0, -1 * g4.mm))
        return self._gun

    def _build(self, silicon):
        """Make the volumes, note the layers of silicon in the list, and return the world."""
        g4 = self._g4
        density = g4.gram / g4.cm3
        mole = g4.gram / g4.mole
        tungsten = g4.G4Material("tungsten", 74, 183.84 * mole, gflash.TUNGSTEN.density * density)
        wafer = g4.G4Material("silicon", 14, 28.0855 * mole, gflash.SILICON.density * density)
        # The gaps are thin silicon, because Geant4's vacuum is hydrogen, for which there are no tables.
        vacuum = g4.G4Material("gap", 14, 28.0855 * mole, 1e-10 * density)

        def box(name, half_width, depth, material, mother=None, begin=0.0):
            solid = g4.G4Box(name, half_width, half_width, depth / 2)
            logical = g4.G4LogicalVolume(solid, material, name)
            middle = g4.G4ThreeVector(0, 0, begin + depth / 2 if mother else 0)
            placed = g4.G4PVPlacement(None, middle, logical, name, mother, False, 0)
            self._kept += [solid, logical, placed]  # Python would free what Geant4 still uses
            return logical, placed

        world, placed = box("world", HALF_WIDTH_MM + 10, 3 * gflash.DEPTH_MM, vacuum)
        for layer, depth in enumerate(gflash.TUNGSTEN_MM):
            box(f"absorber{layer}", HALF_WIDTH_MM, float(depth), tungsten, world, float(_LAYER_BEGIN_MM[layer]))
            begin = float(_SILICON_BEGIN_MM[layer])
            silicon.append(box(f"silicon{layer}", HALF_WIDTH_MM, gflash.SILICON_MM, wafer, world, begin)[0])
        return placed
