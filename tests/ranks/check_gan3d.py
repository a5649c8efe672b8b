# SPDX-License-Identifier: Apache-2.0
"""The GAN of the examples: sizes of its networks, who is trained when, and a resumed run that is the same run."""

import csv
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_cases import enough_on

pytest.importorskip("h5py")
sys.path.append(str(Path(__file__).resolve().parents[2]))

import h5py

import keras_hpc
from examples.gan3d import networks, train
from examples.gan3d.data import Batch, Response

RANKS = {"tensorflow": (2,)}
SOAK = {"tensorflow": (2,)}

BATCH = 3


@pytest.fixture
def job():
    keras_hpc.init(teams=2)
    yield keras_hpc
    keras_hpc.finalize()


def blobs(count=26, size=13):
    """Showers: a blob in the middle whose sum is 2 % of the energy. Returns images (GeV) and energies (GeV)."""
    rng = np.random.default_rng(5)
    energies = rng.uniform(10, 100, count)
    line = np.exp(-0.5 * ((np.arange(size) - size // 2) / 2) ** 2)
    images = np.einsum("i,j,k->ijk", line, line, line) * rng.gamma(4, 0.25, (count, size, size, size))
    images *= (0.02 * energies / images.sum(axis=(1, 2, 3)))[:, None, None, None]
    return images.astype("float32"), energies.astype("float32")


@pytest.fixture
def data(tmp_path_factory):
    """A file of every rank's own, the same on all."""
    path = tmp_path_factory.mktemp("data") / "showers.h5"
    images, energies = blobs()
    with h5py.File(path, "w") as file:
        file["ECAL"] = images
        file["target"] = np.stack([np.full(len(energies), 11), energies], axis=1)
    return path


def gan(preset="mini"):
    keras.utils.set_random_seed(3)
    return train.Gan(preset, Response((0, 0, 0, 0, 2.0), lowest=0.1, highest=1.0))


def batch(seed=0):
    images, energies = blobs()
    rows = np.random.default_rng([seed, keras_hpc.rank()]).permutation(len(images))[:BATCH]
    images, energies = images[rows, ..., None] * 100, energies[rows, None] / 100
    return Batch(images, energies, images.sum(axis=(1, 2, 3)))


def values(model):
    return {v.path: np.array(v) for v in model.weights}


def changed(before, model):
    return {path for path, value in values(model).items() if not np.array_equal(before[path], value)}


@pytest.mark.parametrize(
    ("preset", "shape", "generator", "discriminator"),
    [
        ("paper", (25, 25, 25, 1), (872_948, 872_808), (73_450, 73_402)),
        ("mini", (13, 13, 13, 1), (565_600, 565_536), (26_850, 26_850)),
    ],
)
def test_numbers_of_parameters(preset, shape, generator, discriminator):
    g, d = networks.generator(preset), networks.discriminator(preset)
    for model, (total, trainable) in ((g, generator), (d, discriminator)):
        assert model.count_params() == total
        assert sum(np.prod(v.shape) for v in model.trainable_variables) == trainable
    assert g.input_shape == (None, 200)
    assert g.output_shape == (None, *shape) == d.input_shape
    assert list(d.output) == ["generation", "auxiliary", "ecal"]
    slopes = [layer.negative_slope for m in (g, d) for layer in m.layers if hasattr(layer, "negative_slope")]
    assert set(slopes) == {0.3}
    assert not any(v.path.endswith("bias") for v in g.layers[-1].variables)


def test_heads_say_sum_and_probability():
    images = np.random.default_rng(1).random((2, 13, 13, 13, 1)).astype("float32")
    found = networks.discriminator("mini").predict_on_batch(images)
    np.testing.assert_allclose(found["ecal"][:, 0], images.sum(axis=(1, 2, 3, 4)), rtol=1e-5)
    assert ((found["generation"] > 0) & (found["generation"] < 1)).all()


def test_generated_showers_depend_on_energy_and_seed():
    g = networks.generator("mini")
    energies = np.array([10.0, 100.0, 50.0])
    one, same, other = (networks.generate(g, np.random.default_rng(s), energies, batch_size=2) for s in (1, 1, 2))
    assert one.shape == (3, 13, 13, 13)
    assert (one >= 0).all()
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    noise = networks.noise_of(np.random.default_rng(1), np.full((50, 1), 0.5))
    assert noise.std() == pytest.approx(0.5, rel=0.05)


@enough_on()
def test_each_step_trains_one_network(job):
    model = gan()
    x, y, sums = batch()
    rng = np.random.default_rng(keras_hpc.rank())
    d, g = values(model.discriminator), values(model.generator)
    train._train(model.discriminator, x, model._targets(1, y, sums, rng))
    assert not changed(g, model.generator)
    assert changed(d, model.discriminator) == set(d)

    d = values(model.discriminator)
    with networks.frozen(model.discriminator):
        train._train(model.combined, networks.noise_of(rng, y), model._targets(1, y, 200 * y))
    assert not changed(d, model.discriminator)
    assert changed(g, model.generator) == set(g)

    # The first steps were traced: the discriminator goes on to learn.
    train._train(model.discriminator, x, model._targets(1, y, sums, rng))
    assert changed(d, model.discriminator) == set(d)
    keras_hpc.check_replicas(model.combined)


def test_frozen_discriminator_keeps_its_statistics_and_drops_out():
    d = networks.discriminator("paper")
    images = np.random.default_rng(1).random((2, 25, 25, 25, 1)).astype("float32")
    before = values(d)
    with networks.frozen(d):
        one, two = (np.array(d(images, training=True)["auxiliary"]) for _ in range(2))
    assert not np.array_equal(one, two)
    assert not changed(before, d)
    assert d.trainable
    assert len(d.trainable_variables) == 18
    d(images, training=True)
    assert {path.rpartition("/")[2] for path in changed(before, d)} == {"moving_mean", "moving_variance"}


@enough_on()
def test_paper_preset_makes_a_step(job):
    model = gan("paper")
    images = np.random.default_rng(keras_hpc.rank()).random((1, 25, 25, 25, 1)).astype("float32")
    g = values(model.generator)
    losses = model.step(Batch(images, np.full((1, 1), 0.5), images.sum(axis=(1, 2, 3))), np.random.default_rng(1))
    assert np.isfinite(list(losses.values())).all()
    assert changed(g, model.generator) == set(g)


@enough_on()
def test_losses_are_weighted(job):
    model = gan()
    losses = model.step(batch(), np.random.default_rng(keras_hpc.rank()))
    assert list(losses) == train.LOSSES
    assert np.isfinite(list(losses.values())).all()
    for who in "dg":
        parts = (2 * losses[f"{who}_generation"], 0.1 * losses[f"{who}_auxiliary"], 0.3 * losses[f"{who}_ecal"])
        assert losses[f"{who}_loss"] == pytest.approx(sum(parts), rel=1e-4)
    published = train.networks.compile_arguments("paper")["loss_weights"]
    assert published == {"generation": 2, "auxiliary": 0.1, "ecal": 0.1}
    # Of the real showers the sum is exact; what remains is that of the generated ones.
    assert isinstance(model.combined.optimizer, keras.optimizers.RMSprop)
    assert model.combined.optimizer is not model.discriminator.optimizer
    assert len(model.combined.optimizer.variables) - 2 == len(model.generator.trainable_variables)


def test_labels_are_flipped_now_and_then():
    many = np.ones((4000, 1))
    labels = train.Gan._targets(0, many, many, np.random.default_rng(1))["generation"]
    assert labels.shape == (4000, 1)
    assert labels.mean() == pytest.approx(0.05, abs=0.012)
    assert train.Gan._targets(1, many, many)["generation"].all()


@enough_on()
def test_a_resumed_run_is_the_same_run(data, tmp_path_factory):
    folder = shared_folder(tmp_path_factory)

    def run(name, *options):
        settings = ["--batch-size", BATCH, "--steps", 2, "--schedule-g", "pipelined", "--synchronous-epochs", 0]
        where = ["--data", data, "--out", folder / name]
        trained = train.main([str(option) for option in (*where, *settings, *options)])
        found = [v for m in trained.models for v in (*m.weights, *m.optimizer.variables)]
        arrays = {i: np.array(v) for i, v in enumerate(found)}
        keras_hpc.finalize()
        return arrays

    whole = run("whole", "--epochs", 2)
    run("parts", "--epochs", 1)
    parts = run("parts", "--epochs", 2, "--resume")
    assert len(whole) > 50
    assert all(np.array_equal(whole[i], parts[i]) for i in whole)
    first, second = ((folder / name / "losses.csv").read_bytes() for name in ("whole", "parts"))
    assert first == second
    assert len(list(csv.DictReader((folder / "whole" / "losses.csv").open()))) == 4
    with pytest.raises(SystemExit, match="is of a run with"):
        run("parts", "--epochs", 3, "--resume", "--seed", 2)
    keras_hpc.finalize()


def shared_folder(tmp_path_factory):
    """A folder that all ranks write to: rank 0's."""
    mine = str(tmp_path_factory.mktemp("runs"))
    keras_hpc.init(teams=2)
    from keras_hpc.job import current

    folder = current.job().teams[0].allgather_object(mine)[0]
    keras_hpc.finalize()
    return Path(folder)
