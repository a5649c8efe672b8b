# SPDX-License-Identifier: Apache-2.0
"""What scripts draw is the same on all ranks; what layers and operations draw in steps differs by rank."""

import contextlib
import random

import keras
import numpy as np
import pytest
from keras_cases import Parts, data, everyone, job, values

import keras_hpc


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(shard=False)
    yield
    keras_hpc.finalize()


def trained(model, *data):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    model.fit(*data, shuffle=False, verbose=0)


def test_dropout_differs_by_rank_and_is_reproducible():
    def run():
        keras.utils.set_random_seed(4)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
        trained(model, Parts(*data()))
        (generator,) = model.layers[0]._seed_generators
        with keras_hpc.step(samples=4):
            noise = np.array(model.layers[0](np.ones((4, 6), "float32"), training=True))
        return noise.tolist(), np.array(generator.state).tolist(), [v.tolist() for v in values(model)]

    first, second = run(), run()
    assert first == second
    noises, states, weights = zip(*everyone(first), strict=True)
    assert all(w == weights[0] for w in weights)
    for rank in range(1, job().size):
        assert noises[rank] != noises[0]
        assert states[rank] == states[0], "numbers are folded with the rank where they are drawn"


@pytest.mark.parametrize("in_step", [False, True])
def test_global_random_stream_differs_by_rank_in_steps_only(in_step):
    def draw():
        keras.utils.set_random_seed(9)
        with keras_hpc.step(samples=1) if in_step else contextlib.nullcontext():
            return np.array(keras.random.normal((5,))).tolist()

    first, second = draw(), draw()
    drawn = everyone(second)
    assert len(set(map(tuple, drawn))) == (job().size if in_step else 1)
    if hasattr(keras.src.random.seed_generator, "GLOBAL_SEED_GENERATOR"):  # newer Keras resets it with the seed
        assert first == second
        with keras_hpc.local():
            assert in_step or draw() == second


class Draws(keras.Model):
    """Logs what TensorFlow draws in its step."""

    def train_step(self, data):
        import tensorflow as tf

        return {"drawn": tf.random.normal(()), "same": tf.constant(1.0)}


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="operations of TensorFlow")
@pytest.mark.parametrize("eager", [False, True])
def test_operations_of_tensorflow_differ_by_rank_in_steps_only(eager):
    import tensorflow as tf

    def draw():
        keras.utils.set_random_seed(9)
        model = Draws()
        model.compile(run_eagerly=eager)
        logs = [model.train_on_batch(np.zeros((2, 1)), return_dict=True)["drawn"] for _ in range(2)]
        with keras_hpc.step(samples=1):
            in_loop = float(tf.random.normal(()))
        return [*map(float, logs), in_loop], [float(tf.random.normal(())), random.random()]

    first, second = draw(), draw()
    assert first == second
    in_steps, outside = zip(*everyone(first), strict=True)
    assert len({number for numbers in in_steps for number in numbers}) == 3 * job().size
    assert all(numbers == outside[0] for numbers in outside)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow's own seed")
def test_an_order_with_a_seed_is_that_of_a_script_without_init():
    """It may say which samples are for validation, in a run that goes on, too. One without a seed is that of all."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    def order(seed=None):
        return [int(x) for x in tf.data.Dataset.range(50).shuffle(50, seed)]

    keras_hpc.finalize()
    context.context()._seed = None  # as in a script: other checks of this process have set one
    expected = order(seed=7)
    random.seed()
    keras_hpc.init(shard=False)
    mine = [order(seed=7), order(), order()]
    assert mine[0] == expected
    assert mine[1] != mine[2]
    assert everyone(mine) == [mine] * job().size


def test_scripts_draw_the_same_on_all_ranks():
    keras.layers.Dense(3).build((None, 6))  # draws from Python's own generator
    drawn = [random.random(), np.random.normal(), keras.initializers.GlorotUniform()((4, 4))]
    texts = [np.array(keras.ops.convert_to_numpy(x)).tolist() for x in drawn]
    assert all(other == texts for other in everyone(texts))


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="the others have no stream besides Keras'")
@pytest.mark.parametrize("in_step", [False, True])
def test_dropout_without_a_seed_differs_by_rank_in_steps_only(in_step):
    def draw():
        keras.utils.set_random_seed(9)
        trained(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]), *data())
        with keras_hpc.step(samples=1) if in_step else contextlib.nullcontext():
            dropped = keras.layers.Dropout(0.5)(np.ones((1, 64)), training=True)
        return np.array(keras.ops.convert_to_numpy(dropped)).tolist()

    if not in_step:
        assert len({str(drawn) for drawn in everyone(draw())}) == 1
        return
    draw()
    assert len({str(drawn) for drawn in everyone(draw())}) == job().size
