# SPDX-License-Identifier: Apache-2.0
"""The backend's own tensors through the engine, eagerly and compiled, against NumPy and mpi4py."""

import ctypes
import functools

import keras
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import keras_hpc
from keras_hpc import backends
from keras_hpc.backends import library_path
from keras_hpc.job import current
from keras_hpc.job.plan import TensorSpec

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
backend = backends.current()
BACKEND = keras.backend.backend()
is_jax = BACKEND == "jax"
if is_jax:
    import jax
    import jax.numpy as jnp

    compiled, tensor = jax.jit, jnp.asarray
elif BACKEND == "torch":
    import torch

    # Without a compiler for what is captured: that takes long, and reductions are not part of it.
    compiled, tensor = functools.partial(torch.compile, backend="aot_eager"), keras.ops.convert_to_tensor
else:
    import tensorflow as tf

    compiled, tensor = tf.function, tf.constant

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-6, "float64": 1e-14, "int32": 0, "int64": 0}
SHAPES = [(), (1,), (7,), (0,), (3, 0, 2), (5, 3), (33, 17), (1025,), (2, 3, 5, 7)]


@pytest.fixture(scope="module", autouse=True)
def job():
    keras_hpc.init()
    yield
    keras_hpc.finalize()


@pytest.fixture(params=["eagerly", "compiled"])
def run(request):
    return compiled if request.param == "compiled" else lambda function: function


@pytest.fixture
def wide():
    """Lets JAX have 64-bit types."""
    if is_jax:
        jax.config.update("jax_enable_x64", True)
    yield
    if is_jax:
        jax.config.update("jax_enable_x64", False)


def make_plan(request, arrays, **options):
    specs = [TensorSpec(f"t{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
    return current.job().teams[0].plan(request.node.name, specs, **options)


def draw(shapes, dtype="float32", seed=0):
    generator = np.random.default_rng([seed, rank])
    return [np.asarray(10 * generator.normal(size=shape)).astype(dtype) for shape in shapes]


def check(results, arrays, weights=None, op="mean"):
    """Compares with the sum in float64, and all ranks with each other, bit for bit."""
    weights = np.ones(size) if weights is None else np.asarray(weights, float)
    assert len(results) == len(arrays)
    for result, array in zip(results, arrays, strict=True):
        got = backend.to_numpy(result)
        assert got.shape == array.shape
        assert got.dtype == array.dtype
        everyone = [a.astype(np.float64) for a in world.allgather(array)]
        want = sum((w * a for w, a in zip(weights, everyone, strict=True) if w), np.zeros(array.shape))
        if op == "mean":
            want = want / weights.sum()
        tolerance = TOLERANCE[array.dtype.name]
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=10 * tolerance)
        assert world.allgather(got.tobytes()) == [got.tobytes()] * size


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes_and_shapes(dtype, run, wide, request):
    arrays = draw(SHAPES, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    op = "sum" if dtype.startswith("int") else "mean"
    plan = make_plan(request, arrays, op=op)
    step = run(lambda *tensors: backend.reduce(plan, tensors))
    tensors = [tensor(a) for a in arrays]
    for _ in range(3):
        check(step(*tensors), arrays, op=op)
    for before, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(before), array)


@pytest.mark.parametrize("kind", ["number", "int32", "float32"])
def test_weights(kind, run, request):
    arrays = draw(SHAPES)
    plan = make_plan(request, arrays)
    weights = [5 + r for r in range(size)]
    if kind == "number":
        step = run(lambda *tensors: backend.reduce(plan, tensors, weight=weights[rank]))
        check(step(*map(tensor, arrays)), arrays, weights)
    else:
        step = run(lambda weight, *tensors: backend.reduce(plan, tensors, weight=weight))
        for factor in (1, 3):
            weight = tensor(np.array(factor * weights[rank], kind))
            check(step(weight, *map(tensor, arrays)), arrays, weights)


@pytest.mark.skipif(size == 1, reason="somebody must have samples")
def test_rank_without_samples_is_not_read(run, request):
    arrays = draw(SHAPES)
    weights = [0.0, *range(1, size)]
    if rank == 0:
        arrays = [np.full_like(a, np.nan) for a in arrays]
    plan = make_plan(request, arrays)
    step = run(lambda weight, *tensors: backend.reduce(plan, tensors, weight=weight))
    check(step(tensor(np.float32(weights[rank])), *map(tensor, arrays)), arrays, weights)


@pytest.mark.parametrize("op", ["min", "max"])
def test_other_operations(op, run, request):
    arrays = draw(SHAPES)
    plan = make_plan(request, arrays, op=op, weighted=False)
    step = run(lambda *tensors: backend.reduce(plan, tensors))
    for result, array in zip(step(*map(tensor, arrays)), arrays, strict=True):
        want = np.empty_like(array)
        world.Allreduce(array, want, MPI.MIN if op == "min" else MPI.MAX)
        np.testing.assert_array_equal(backend.to_numpy(result), want)


def test_many_tensors_and_big_ones_step_after_step(run, request):
    arrays = draw([*((1 + i,) for i in range(60)), (2 << 20,), (1001, 17), (300_001,)])
    plan = make_plan(request, arrays)
    step = run(lambda *tensors: backend.reduce(plan, tensors))
    tensors = [tensor(a) for a in arrays]
    results = step(*tensors)
    check(results, arrays)
    first = [backend.to_numpy(r) for r in results]
    for _ in range(50 if run is compiled else 5):
        results = step(*tensors)
        assert all(np.array_equal(backend.to_numpy(r), f) for r, f in zip(results, first, strict=True))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA decides at compile time; PyTorch has a test of its own")
def test_what_nobody_else_holds_is_reduced_where_it_lies(request):
    def copied_by(step):
        before = library.khpc_tensorflow_copied_bytes()
        results = step(*map(tensor, arrays))
        check(results, [2 * a for a in arrays])
        return library.khpc_tensorflow_copied_bytes() - before

    library = ctypes.CDLL(library_path("keras_hpc_tensorflow"))
    library.khpc_tensorflow_copied_bytes.restype = ctypes.c_int64
    arrays = draw([(5, 3), (300_001,), (7,)])
    plan = make_plan(request, arrays)
    assert copied_by(tf.function(lambda *tensors: backend.reduce(plan, [2 * x for x in tensors]))) == 0

    @tf.function
    def keeping(*tensors):
        doubled = [2 * x for x in tensors]
        results = backend.reduce(plan, doubled)
        with tf.control_dependencies(results):
            return [result + 0 * kept for result, kept in zip(results, doubled, strict=True)]

    assert copied_by(keeping) == sum(a.nbytes for a in arrays)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA decides at compile time; PyTorch's are where variables are")
def test_what_one_rank_gives_is_sent_from_its_variable(request):
    library = ctypes.CDLL(library_path("keras_hpc_tensorflow"))
    library.khpc_tensorflow_copied_bytes.restype = ctypes.c_int64
    arrays = [np.full(n, rank, np.float32) for n in (300_001, 7)]
    specs = [TensorSpec(f"t{i}", a.shape, "float32", size - 1) for i, a in enumerate(arrays)]
    plan = current.job().teams[0].plan(request.node.name, specs, op="sum", weighted=False)
    variables = list(map(tf.Variable, arrays))
    given = tf.function(lambda: backend.gather(plan, [tf.convert_to_tensor(v) for v in variables]))
    before = library.khpc_tensorflow_copied_bytes()
    for step in range(3):
        for result, variable in zip(given(), variables, strict=True):
            assert (backend.to_numpy(result) == size - 1 + step).all()
            assert (variable.numpy() == rank + step).all()
            variable.assign_add(tf.ones_like(variable))
    copied = library.khpc_tensorflow_copied_bytes() - before
    assert copied == (0 if rank == size - 1 else 3 * sum(a.nbytes for a in arrays))


@pytest.mark.parametrize("static", [True, False], ids=["static", "traced"])
def test_inactive_steps_change_nothing(static, run, request):
    arrays = draw(SHAPES)
    plan = make_plan(request, arrays)
    steps = {}
    for turn in (True, False, False, True):
        if static:
            steps[turn] = run(lambda *tensors, turn=turn: backend.reduce(plan, tensors, active=turn))
            results = steps[turn](*map(tensor, arrays))
        else:
            step = steps.setdefault(None, run(lambda active, *tensors: backend.reduce(plan, tensors, active=active)))
            results = step(tensor(turn), *map(tensor, arrays))
        if turn:
            check(results, arrays)
        else:
            for result, array in zip(results, arrays, strict=True):
                np.testing.assert_array_equal(backend.to_numpy(result), array)


@pytest.mark.skipif(not is_jax, reason="JAX's way to run programs")
def test_programs_have_side_effects_for_xla_alone(request):
    # JAX would run those of which it knows through Python, which costs more than their reduction.
    plan = make_plan(request, [np.zeros(3, np.float32)] * 2)
    program = jax.jit(lambda *gradients: backend.reduce(plan, list(gradients)))
    arguments = (jnp.zeros(3), jnp.zeros(3))
    assert not jax.make_jaxpr(program)(*arguments).effects
    assert program.lower(*arguments).as_text().count("has_side_effect = true") == 3


def test_loop_in_one_program(request):
    arrays = [np.full(4, float(rank), np.float32), np.full((2, 3), 2.0 * rank, np.float32)]
    plan = make_plan(request, arrays)

    def once(first, second):
        first, second = backend.reduce(plan, [first + rank, second + 1])
        return first, second

    if is_jax:
        step = jax.jit(lambda *state: jax.lax.fori_loop(0, 5, lambda _, state: once(*state), state))
    elif BACKEND == "torch":

        @compiled
        def step(first, second):
            for _ in range(5):
                first, second = once(first, second)
            return first, second

    else:

        @tf.function
        def step(first, second):
            for _ in tf.range(5):
                first, second = once(first, second)
            return first, second

    first, second = (backend.to_numpy(x) for x in step(*map(tensor, arrays)))
    mean = (size - 1) / 2
    np.testing.assert_allclose(first, 6 * mean, rtol=1e-6)
    np.testing.assert_allclose(second, 2 * mean + 5, rtol=1e-6)


def test_values_used_elsewhere_keep_theirs(request):
    plan = make_plan(request, [np.ones(4, np.float32)] * 3)
    variable = keras.Variable(np.full(4, float(rank), np.float32))

    @compiled
    def step(x):
        product = x * (rank + 1)
        results = backend.reduce(plan, [product, product, x])
        return product, results, product + 1

    value = variable.value.detach() if BACKEND == "torch" else variable.value
    for _ in range(3):
        product, results, later = step(value)
        np.testing.assert_array_equal(backend.to_numpy(product), rank * (rank + 1))
        np.testing.assert_array_equal(backend.to_numpy(later), rank * (rank + 1) + 1)
        for result in results[:2]:
            mean = np.mean([r * (r + 1) for r in range(size)])
            np.testing.assert_allclose(backend.to_numpy(result), mean, rtol=1e-6)
        np.testing.assert_array_equal(backend.to_numpy(variable), rank)


def test_what_does_not_fit_the_plan_is_refused_before_anything_starts(run, request):
    plan = make_plan(request, [np.ones(4, np.float32), np.ones(3, np.float32)])
    step = run(lambda *tensors: backend.reduce(plan, tensors))
    good = [tensor(np.ones(4, np.float32)), tensor(np.ones(3, np.float32))]
    for bad in (good[::-1], [good[0], tensor(np.ones(3, np.int32))], good[:1]):
        with pytest.raises(ValueError, match=r"does not fit the plan.*Received|shorter|longer"):
            step(*bad)
    check(step(*good), [np.ones(4, np.float32), np.ones(3, np.float32)])


def test_helpers():
    for dtype in ("float32", "float16", "bfloat16", "int32"):
        variable = keras.Variable(np.zeros(3), dtype=dtype, trainable=False)
        copy = backend.to_numpy(variable)
        assert copy.dtype.name == dtype
        copy[:] = 2
        assert backend.to_numpy(variable).tolist() == [0, 0, 0]
        backend.assign(variable, copy)
        copy[:] = 3
        assert backend.to_numpy(variable.value).tolist() == [2, 2, 2]
    seen = []
    compiled(lambda x: seen.append(backend.is_traced(x)))(tensor(1.0))
    assert seen == [BACKEND != "torch"]  # whose programs are left for every reduction
    assert not any(map(backend.is_traced, (tensor(1.0), np.ones(1), variable)))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's sparse gradients")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_allgather_rows(dtype, run):
    team = current.job().teams[0]
    gather = run(lambda x: backend.allgather_rows(team, x))
    for rows, row in ((rank + 1, (3,)), (rank, ()), (0, (2,)), (2, (0, 4)), (1000 * (size - rank), (7, 2))):
        mine = tf.cast(tf.fill((rows, *row), rank + 1), dtype)
        want = np.concatenate(world.allgather(backend.to_numpy(mine).astype(np.float64)))
        got = gather(mine)
        assert got.dtype == mine.dtype
        np.testing.assert_array_equal(backend.to_numpy(got).astype(np.float64), want)
    with pytest.raises(tf.errors.InternalError, match="Received: a scalar"):
        gather(tf.constant(1.0))


torch_only = pytest.mark.skipif(BACKEND != "torch", reason="gradients that come one by one are PyTorch's")


@torch_only
def test_threads_are_limited_unless_the_user_has(monkeypatch):
    before = torch.get_num_threads()
    assert backend.limit_threads(before + 1) == ([], [])  # the tests set OMP_NUM_THREADS
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert backend.limit_threads(before + 1) == ([f"{before + 1} torch threads"], [])
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def torch_gradients(request, arrays):
    specs = [TensorSpec(f"t{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
    specs.append(TensorSpec("which came", (len(arrays),), "float32"))
    team = current.job().teams[0]
    return backend.gradients_of(team.plan(request.node.name, specs, in_segment=True))


@torch_only
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_gradients_come_in_any_order_and_stay_where_they_are(dtype, request):
    arrays = draw(SHAPES, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    gradients = torch_gradients(request, arrays)
    weights = [1 + r for r in range(size)]
    for _ in range(3):
        early = [2, 0, 5] if rank == 0 else [7, 2]
        places = {i: gradients.give(i, tensor(arrays[i]), weights[rank]) for i in early}
        assert gradients.begun
        means = gradients.reduce([places.get(i, tensor(a)) for i, a in enumerate(arrays)], weights[rank])
        assert not gradients.begun
        check(means, arrays, weights)
        assert all(means[i] is place for i, place in places.items())


@torch_only
def test_gradients_that_only_some_ranks_have(request):
    """As on one rank that computes the batches of all: zero where a rank has none, none where no rank has one."""
    arrays = draw([(3,), (2, 2), (5,)])
    gradients = torch_gradients(request, arrays)
    mine = [tensor(arrays[0]), tensor(arrays[1]) if rank == 0 else None, None]
    first, second, third = gradients.reduce(mine, None)
    check([first], arrays[:1])
    check([second], [arrays[1] if rank == 0 else np.zeros_like(arrays[1])])
    assert third is None
    check(gradients.reduce(list(map(tensor, arrays)), None), arrays)


@torch_only
@pytest.mark.parametrize("who", ["all", "one"])
def test_a_step_that_is_abandoned_leaves_the_next_one_alone(who, request):
    arrays = draw([(3,), (2, 2), (5,)])
    gradients = torch_gradients(request, arrays)
    gradients.give(1, tensor(arrays[1]), None)
    if who == "all" or rank == 0:
        gradients.abandon(None)
    else:
        with pytest.raises(RuntimeError, match="Another rank has left this training step"):
            gradients.reduce(list(map(tensor, arrays)), None)
    check(gradients.reduce(list(map(tensor, arrays)), None), arrays)


@torch_only
def test_a_gradient_that_comes_twice_is_refused(request):
    arrays = draw([(3,), (2, 2)])
    gradients = torch_gradients(request, arrays)
    gradients.give(1, tensor(arrays[1]), None)
    with pytest.raises(RuntimeError, match=r"came twice in one step.*Received: `t1`"):
        gradients.give(1, tensor(arrays[1]), None)
    with pytest.raises(ValueError, match=r"does not fit the plan.*Received"):
        gradients.give(0, tensor(arrays[1]), None)
    check(gradients.reduce(list(map(tensor, arrays)), None), arrays)
