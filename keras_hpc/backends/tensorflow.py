# SPDX-License-Identifier: Apache-2.0
"""TensorFlow: two stateful operations per tensor, started as early and awaited as late as possible."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_hpc.backends import library_path, tensorflow_exchange
from keras_hpc.backends import tensorflow_pieces as pieces  # noqa: F401 (others use it)
from keras_hpc.backends.tensorflow_exchange import after as after
from keras_hpc.job import current

_ops: Any = None

# Start and wait can do the work themselves.
NEEDS_THREAD = False
# Only those of gradients. What else is on a GPU, TensorFlow copies to the host and back itself.
PLANS_ON_GPU = False


def load() -> None:
    """Load the operations.

    Raises:
        ImportError: the library is missing, or does not fit this TensorFlow.
    """
    global _ops
    path = library_path("keras_hpc_tensorflow")
    try:
        ops = tf.load_op_library(path)
    except tf.errors.NotFoundError as error:
        raise ImportError(f"TensorFlow {tf.__version__} cannot load {path}: {error.message}") from error
    load_error = ctypes.CDLL(path).khpc_tensorflow_load_error
    load_error.restype = ctypes.c_char_p
    if message := load_error().decode():
        raise ImportError(f"{path} does not fit TensorFlow {tf.__version__}: {message}")
    _ops = ops


def sees_gpus() -> bool:
    """Return whether TensorFlow can compute on GPUs here."""
    return bool(tf.config.list_physical_devices("GPU"))


@contextlib.contextmanager
def use_device(device: Any) -> Iterator[None]:
    """Compute on one GPU, or, with None, on the CPU, also where there are GPUs.

    Args:
        device: the `Device` of this rank, or None.

    Raises:
        RuntimeError: TensorFlow has started its devices.
    """
    gpus = tf.config.list_physical_devices("GPU")
    wanted = [] if device is None else [gpus[device.ordinal]]
    try:
        tf.config.set_visible_devices(wanted, "GPU")
        if device is not None and device.ranks > 1:  # else the first one takes all of its memory
            tf.config.experimental.set_memory_growth(gpus[device.ordinal], True)
    except RuntimeError as error:
        raise RuntimeError(
            "TensorFlow has started its devices, so that no GPU can be chosen for this rank any more. Call "
            f"keras_hpc.init() before anything is computed. TensorFlow says: {error}"
        ) from error
    yield


def limit_threads(count: int, teams: int = 1) -> tuple[list[str], list[str]]:
    """Limits the threads that TensorFlow computes with, where the user has not set them. Before it starts them.

    Args:
        count: how many threads.
        teams: models that may train at the same time, in threads of the user's.

    Returns:
        What was set, and what could not be.
    """
    threading = tf.config.threading
    wanted = [
        ("TF_NUM_INTRAOP_THREADS", "intra-op threads", "intra_op_parallelism_threads", count),
        # One thread of each team may wait for other ranks, and without another, weight gradients all come last.
        ("TF_NUM_INTEROP_THREADS", "inter-op threads", "inter_op_parallelism_threads", max(1 + teams, count)),
    ]
    done, failed = [], []
    for variable, name, setting, threads in wanted:
        if variable in os.environ or getattr(threading, f"get_{setting}")() > 0:
            continue
        try:
            getattr(threading, f"set_{setting}")(threads)
            done.append(f"{threads} {name}")
        except RuntimeError:  # TensorFlow has started them
            failed.append(name)
    return done, failed


def device_of(tensors: Sequence[Any], pipelined: bool = False) -> int | None:
    """Return the number of the GPU that has all of these variables; None: none has, or what is not read there."""
    device = current.job().device
    if device is None or pipelined:
        return None
    held = [getattr(x, "value", x) for x in tensors]
    on_gpu = [isinstance(x, tf.Variable) and tf.DeviceSpec.from_string(x.device).device_type == "GPU" for x in held]
    return device.ordinal if on_gpu and all(on_gpu) else None


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def reduce(plan: Any, tensors: Sequence[Any], weight: Any = None, active: Any = None) -> list[tf.Tensor]:
    """Reduces the tensors of a plan over the ranks of its team.

    Collective. TensorFlow runs stateful operations in program order. So all starts come before all waits, both in
    the plan's order, which is the order in which the tensors come to exist: backward order, for gradients.

    Args:
        plan: the `Plan` of these tensors.
        tensors: one tensor for each of the plan's, in its order, of the same shape and dtype.
        weight: this rank's weight in a weighted mean, a number or a scalar tensor. Defaults to 1.
        active: `None`, or a scalar bool tensor, the same on all ranks: if false, nothing is communicated and the
            tensors are returned unchanged.

    Returns:
        The reduced tensors, in the plan's order.
    """
    if active is not None:
        unchanged = list(map(tf.convert_to_tensor, tensors))
        chosen: list[tf.Tensor] = tf.cond(
            tf.convert_to_tensor(active, tf.bool), lambda: reduce(plan, unchanged, weight), lambda: unchanged
        )
        return chosen
    if plan.device is None:
        return _wait(plan, _start(plan, tensors, weight))
    return list(map(tf.convert_to_tensor, tensors)) if plan.is_idle else _reduce_on(plan, tensors, weight)


def _reduce_on(plan: Any, tensors: Sequence[Any], weight: Any) -> list[tf.Tensor]:
    with tf.device("CPU:0"):
        weight = tf.constant(1.0, tf.float64) if weight is None else tf.cast(weight, tf.float64)
    with tf.device("GPU:0"):  # the only one that this process sees
        tensors = [_checked(x, spec) for x, spec in zip(tensors, plan.tensors, strict=True)]
        # Once a part of a tensor has come to the host, the GPU has computed it all.
        started = [
            _ops.khpc_start_on(x, tf.reshape(x, [-1])[:1], weight, plan=plan.id, tensor=i)
            for i, x in enumerate(tensors)
        ]
        means = [_ops.khpc_wait_on(x, plan=plan.id, tensor=i, first=int(i == 0)) for i, x in enumerate(started)]
    return _shaped(plan, means)


def _start(plan: Any, tensors: Sequence[Any], weight: Any) -> list[tf.Tensor]:
    weight = tf.constant(1.0, tf.float64) if weight is None else tf.cast(weight, tf.float64)
    # Nothing is started before everything is checked: a plan that is started in part can never be completed.
    tensors = [_checked(x, spec) for x, spec in zip(tensors, plan.tensors, strict=True)]
    _mention_one_thread()
    with _on_host():
        return [_ops.khpc_start(x, weight, plan=plan.id, tensor=i) for i, x in enumerate(tensors)]


@functools.cache  # once
def _mention_one_thread() -> None:
    if "1" in (os.environ.get("TF_NUM_INTEROP_THREADS"), str(tf.config.threading.get_inter_op_parallelism_threads())):
        current.notice(
            "TensorFlow has one inter-op thread (TF_NUM_INTEROP_THREADS=1, or tf.config), so it starts gradients only "
            "when backward is over, and no reduction is hidden behind it. Expected 2 or more, or none set before init()"
        )


def _wait(plan: Any, started: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    with _on_host():
        return _shaped(plan, [_ops.khpc_wait(x, plan=plan.id, tensor=i) for i, x in enumerate(started)])


def _on_host() -> contextlib.AbstractContextManager[Any]:
    """Return what keeps a buffer where it is from its start to its wait.

    An operation that runs by itself is a program of its own to TensorFlow, which moves what a program returns to the
    device it ran on: to a GPU while it is being reduced. Inside a program it stays on the host.
    """
    device: contextlib.AbstractContextManager[Any] = tf.device("CPU:0")
    return contextlib.nullcontext() if in_program() else device


def _shaped(plan: Any, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    for x, spec in zip(tensors, plan.tensors, strict=True):
        x.set_shape(spec.shape)
    return tensors


# Of a plan each of whose tensors one rank gives.
gather = reduce


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def turn(plan: Any, tensors: Sequence[Any], weight: Any = None, active: Any = None) -> tuple[list[tf.Tensor], Any]:
    """The same for a pipelined plan; `active` is not needed here.

    Returns:
        What the first update of this step applies, and how many updates it makes, a scalar tensor: 0, 1 or 2.
    """
    started = _start(plan, tensors, weight)
    # Before the waits: so a variable can be updated as soon as its own gradient is there.
    updates = _ops.khpc_updates(plan=plan.id)
    updates.set_shape(())
    return _wait(plan, started), updates


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def repeat(plan: Any, updates: Any, reduced: Sequence[Any], update: Callable[[list[Any]], None]) -> None:
    """Make the updates of a step: call `update` with what each applies. Collective."""

    def first() -> tf.Operation:
        update(list(reduced))
        return tf.no_op()

    def second() -> tf.Operation:
        values = [_ops.khpc_second(x, plan=plan.id, tensor=i) for i, x in enumerate(reduced)]
        update(_shaped(plan, values))
        return tf.no_op()

    # Traced twice, because a loop would hold what it is given, and no operation could then work in its place.
    tf.cond(updates > 0, first, tf.no_op)
    tf.cond(updates > 1, second, tf.no_op)


def allgather_rows(team: Any, tensor: Any) -> tf.Tensor:
    """Return the rows of all ranks of a team, in rank order.

    Collective. Blocks.

    Args:
        team: the `Team`.
        tensor: rows of the same shape and dtype on all ranks; their number may differ.
    """
    tensor = tf.convert_to_tensor(tensor)
    rows = _ops.khpc_allgather(tensor, team=team.id)
    rows.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
    return rows


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def allreduce(team: Any, x: Any, op: str, what: str) -> tf.Tensor:
    """Reduce a tensor over the ranks of a team. Collective; inside `tf.function` where the function runs.

    There TensorFlow runs it in program order, among all stateful operations, so ranks make their calls in one order,
    however often and when each traces.

    Args:
        team: the `Team`.
        x: float16, bfloat16, float32, float64, int32 or int64.
        op: "mean", "sum", "min", "max" or "product".
        what: a name of the call, the same on all ranks.
    """
    if not in_program():
        array = to_numpy(x)
        team.allreduce(array, op, what)
        return from_numpy(array, x)
    x = tf.convert_to_tensor(x)
    reduced: tf.Tensor = _ops.khpc_allreduce(x, team=team.id, op=op, what=what)
    reduced.set_shape(x.shape)
    return reduced


def exchange(exchange: Any, x: Any, axis: int, order: Any) -> tf.Tensor:
    """Return this rank's window of a tensor that is split among the ranks of a group. Collective."""
    return tensorflow_exchange.exchange(_ops.khpc_exchange, exchange, x, axis, order)


def with_borders(*what: Any) -> tf.Tensor:
    """Return a convolution of this rank's rows, with what rows of other ranks add to it. Collective."""
    return tensorflow_exchange.with_borders(_ops.khpc_exchange, *what)


def mark(name: str) -> None:
    """Put a name with the time of now into TensorFlow's profile, if one is being made."""
    with tf.profiler.experimental.Trace(name):
        pass


def in_program() -> bool:
    """Return whether a graph is being made."""
    return not tf.executing_eagerly()


def code_is_compiled() -> bool:
    """Return whether AutoGraph may rewrite the code that asks."""
    return in_program()


_uncompiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that AutoGraph does not rewrite."""
    if function not in _uncompiled:
        _uncompiled[function] = tf.autograph.experimental.do_not_convert(function)
    return _uncompiled[function]


def differentiable(
    reduced: Callable[[Any], Any], gradient: Callable[[Any, Any], Any], keeps: bool, x: Any
) -> tf.Tensor:
    """Return `reduced(x)`, with a gradient: `gradient(upstream, values)`, where `values` are x and the result.

    Only if `keeps`, else None.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def result(x: Any) -> Any:
        y = reduced(x)
        return y, lambda upstream: gradient(upstream, (x, y) if keeps else None)

    # A variable is read before, where its tape sees it: `custom_gradient` would ask for a gradient of its own for it.
    y: tf.Tensor = result(tf.convert_to_tensor(x))
    return y


def wants_gradient(x: Any) -> bool:
    """Return True: which tapes watch a tensor is not known."""
    return True


def from_numpy(array: np.ndarray, like: Any) -> tf.Tensor:
    """Return a tensor with a copy of NumPy's values."""
    return tf.constant(array)


def adopt(array: np.ndarray) -> tf.Tensor:
    """Return a tensor with NumPy's memory, if it is aligned to 64 bytes."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__()) if array.dtype.isbuiltin == 1 else tf.constant(array)


def is_traced(x: Any) -> bool:
    """Return whether `x` is a tensor of a graph under construction, without a value yet."""
    return isinstance(x, tf.Tensor) and not hasattr(x, "numpy")


def view(x: Any) -> np.ndarray:
    """Return the value of a tensor or variable, to be read at once."""
    held = _held(x)
    # One operation: what TensorFlow does around it takes several times as long, and steps read many variables.
    tensor = (
        tf.convert_to_tensor(x) if held is None else tf.raw_ops.ReadVariableOp(resource=held.handle, dtype=held.dtype)
    )
    # `numpy()` copies an array. Of a scalar it makes NumPy's, which the other way cannot for every type.
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def to_numpy(x: Any) -> np.ndarray:
    """Return a copy of the value of a tensor or variable."""
    return np.array(view(x))


def assign(variable: Any, value: np.ndarray) -> None:
    """Set a variable."""
    held = _held(variable)
    if held is None or tuple(held.shape) != np.shape(value):
        variable.assign(value)  # which says what is wrong
    else:
        tf.raw_ops.AssignVariableOp(resource=held.handle, value=tf.constant(value, held.dtype))


def _held(x: Any) -> Any:
    """Return TensorFlow's variable that one of Keras is or holds, where it can be read and set at once; else None."""
    held = x if isinstance(x, tf.Variable) else getattr(x, "value", None)
    return held if isinstance(held, tf.Variable) and tf.executing_eagerly() else None


def _checked(x: Any, spec: Any) -> tf.Tensor:
    x = tf.convert_to_tensor(x)
    if x.dtype.name != spec.dtype or not x.shape.is_compatible_with(spec.shape):
        raise spec.misfit(x.shape, x.dtype.name)
    return x


def outside_programs() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which what is given values has values, also while a function is traced."""
    context: contextlib.AbstractContextManager[Any] = tf.init_scope()
    return context


def check_when_run(check: Callable[..., None], *values: Any) -> None:
    """Call `check` whenever the function that is being traced runs, or now; what it raises ends that run.

    Args:
        check: gets NumPy arrays.
        values: tensors.
    """

    def checked(*arrays: np.ndarray) -> np.ndarray:
        check(*arrays)
        return np.zeros((), np.int32)

    tf.numpy_function(checked, list(values), tf.int32)
