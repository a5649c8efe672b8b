"""Wrong calls raise on every rank, say what to do, and leave a job that goes on."""

import keras
import numpy as np
import pytest
from keras_cases import enough

import keras_hpc

RANKS = {"jax": (2,)}
SOAK = {"jax": (2,)}
ORDER = -2  # before any other has called init()


def _model(units=2, dtype="float32"):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, name="head", dtype=dtype)], name="net")
    model.compile("sgd", "mse")
    return model


def test_api_before_init():
    x = np.ones(2, "float32")
    for call in (
        keras_hpc.rank,
        keras_hpc.size,
        keras_hpc.local_rank,
        keras_hpc.node_count,
        keras_hpc.barrier,
        lambda: keras_hpc.allreduce(x),
        lambda: keras_hpc.broadcast(x),
        lambda: keras_hpc.allgather(x),
        lambda: keras_hpc.average({"loss": 1.0}),
        lambda: keras_hpc.check_replicas(_model()),
        lambda: keras_hpc.assign_team(_model(), 0),
    ):
        with pytest.raises(keras_hpc.NotInitializedError, match=r"keras_hpc\.init\(\)"):
            call()


def test_bad_arguments_of_init():
    for arguments, name in (
        ({"teams": 0}, "teams"),
        ({"threads_per_team": -1}, "threads_per_team"),
        ({"batch": "globl"}, "batch"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"check_replicas_every": 0}, "check_replicas_every"),
    ):
        with pytest.raises(ValueError, match=name):
            keras_hpc.init(**arguments)
    with pytest.raises(TypeError, match="communicator"):
        keras_hpc.init(comm=3)
    assert not keras_hpc.is_initialized()


def test_init_twice():
    keras_hpc.init()
    with pytest.raises(RuntimeError, match="twice"):
        keras_hpc.init()
    keras_hpc.barrier()


def test_unknown_team():
    for team in (1, -1, "0"):
        with pytest.raises(ValueError, match=r"no such team.*Received: team="):
            keras_hpc.assign_team(_model(), team)
        with pytest.raises(ValueError, match="no such team"):
            keras_hpc.allreduce(np.ones(2, "float32"), team=team)
    with pytest.raises(TypeError, match="compiled model or an optimizer"):
        keras_hpc.assign_team(object(), 0)
    keras_hpc.barrier()


@pytest.mark.parametrize("differs", ["depth", *enough(["shape", "dtype"])])
def test_models_that_differ_name_the_first_tensor_and_the_ranks(differs):
    if keras_hpc.size() == 1:
        return
    odd = keras_hpc.rank() == 1
    if differs == "depth" and odd:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head"), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    else:
        model = _model(3 if odd and differs == "shape" else 2, "bfloat16" if odd and differs == "dtype" else "float32")
    x = np.ones((8, 3), "float32")
    targets = np.ones((8, model.output_shape[-1]), "float32")
    # train_on_batch, because fit would already refuse data sets that differ between ranks.
    with pytest.raises(keras_hpc.PlanMismatchError, match=r"(?s)(head|dense|iteration).*rank 0.* on (rank )?1\b"):
        model.train_on_batch(x, targets)
    keras_hpc.barrier()


def test_arrays_that_differ():
    if keras_hpc.size() == 1:
        return
    odd = keras_hpc.rank() == 1
    for array in (np.ones(3 if odd else 2, "float32"), np.ones(2, "int32" if odd else "float32")):
        with pytest.raises(keras_hpc.PlanMismatchError, match="Ranks disagree"):
            keras_hpc.allreduce(array)
    assert np.all(keras_hpc.allreduce(np.ones(2, "float32"), op="sum") == keras_hpc.size())


def test_a_call_of_one_rank_alone_is_an_error_that_says_where_it_goes():
    if keras_hpc.size() == 1:
        return
    model = _model(2, "float32")
    x = np.ones((8, 3), "float32")
    call = keras_hpc.barrier if keras_hpc.rank() else lambda: model.predict(x, verbose=0)
    with pytest.raises(keras_hpc.PlanMismatchError, match=r"inside keras_hpc\.local\(\)"):
        call()
    if keras_hpc.rank() == 0:
        with keras_hpc.local():
            assert model.predict(x, verbose=0).shape == (8, 2)
    keras_hpc.barrier()


def test_updates_in_vmap_and_their_derivatives_are_refused():
    if keras.backend.backend() != "jax" or keras_hpc.size() == 1:
        return
    import jax

    weights = [np.ones(2, "float32")]
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([keras.Variable(weights[0])])
    state = [v.value for v in optimizer.variables]

    def updated(weights):
        return optimizer.stateless_apply(state, weights, weights)[0]

    with pytest.raises(NotImplementedError, match=r"inside of jax\.vmap"):
        jax.vmap(updated)([np.ones((3, 2), "float32")])
    with pytest.raises(NotImplementedError, match="update by hand"):
        jax.grad(lambda weights: updated(weights)[0].sum())(weights)


def test_optimizers_and_metrics_that_differ_are_named():
    if keras_hpc.size() == 1:
        return
    odd = keras_hpc.rank() == 1
    x = np.ones((8, 3), "float32")
    model = _model()
    model.compile("sgd" if odd else "adam", "mse")
    with pytest.raises(keras_hpc.PlanMismatchError, match=r"or their optimizers.*and no variable on 1"):
        model.fit(x, x[:, :2], verbose=0)
    model = _model()
    model.compile("sgd", "mse", metrics=["mae"] if odd else [])
    with pytest.raises(keras_hpc.PlanMismatchError, match="states of metrics"):
        model.fit(x, x[:, :2], verbose=0)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"validation_data": (np.ones((8, 3), "float32"), np.ones((8, 2), "float32"))}, "validation data"),
        ({"epochs": 3}, "epochs"),
    ],
    ids=["validation", "epochs"],
)
def test_what_is_asked_of_fit_must_be_the_same_on_all_ranks(asked, what):
    if keras_hpc.size() == 1:
        return
    x = np.ones((8, 3), "float32")
    given = asked if keras_hpc.rank() == 1 else {}
    with pytest.raises(ValueError, match=f"the same {what}.*Received: (none|1) on rank 0.* (some|3) on rank 1"):
        _model().fit(x, x[:, :2], verbose=0, **given)


def test_a_model_that_one_rank_has_left_out_is_named(caplog):
    def trained(name):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name=name)
        model.compile("sgd", "mse")
        with caplog.at_level("WARNING", "keras_hpc"):
            model.fit(np.ones((8, 3), "float32"), np.ones((8, 2), "float32"), verbose=0)

    trained("one")
    assert "trained as one model" not in caplog.text
    trained("one" if keras_hpc.rank() == 0 else "two")
    first = keras_hpc.rank() == 0 and keras_hpc.size() > 1
    assert ("trains `one` on rank 0 of the team, and `two` on rank 1" in caplog.text) == first


def test_an_exception_of_one_rank_ends_the_same_fit_on_all():
    """A script catches it, as a search of hyperparameters does, and trains its next models."""

    class Bad(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if keras_hpc.rank() == 1:
                raise OSError("the disk is full")

    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    y = x[:, :2]
    caught = []
    models = [_model(), _model(), _model(), _model()]
    for number, model in enumerate(models):
        model.optimizer.learning_rate = 0.1 * (number + 1)
        try:
            model.fit(x, y, batch_size=4, verbose=0, callbacks=[Bad()] if number in (0, 2) else [])
        except Exception as error:  # noqa: BLE001  as such a script does
            caught.append((number, str(error)))
            if number == 2:  # it tries again at once
                with pytest.raises(Exception, match="the disk is full"):
                    model.fit(x, y, batch_size=4, verbose=0, callbacks=[Bad()])
    everyone = [list(weights) for weights in zip(*keras_hpc.allgather(_flat(models[1::2])[None]), strict=True)]
    assert [number for number, _ in caught] == [0, 2]
    assert all("the disk is full" in text for _, text in caught)
    assert all(len(set(weights)) == 1 for weights in everyone)
    assert len(set(_flat(models[1::2]).reshape(2, -1)[:, 0])) == 2  # they have learned at other rates
    models[0].fit(x, y, batch_size=4, verbose=0)


def _flat(models):
    return np.concatenate([keras.ops.convert_to_numpy(w).ravel() for model in models for w in model.weights])


def test_api_after_finalize():
    keras_hpc.finalize()
    with pytest.raises(keras_hpc.NotInitializedError, match=r"finalize\(\)"):
        keras_hpc.rank()
