# SPDX-License-Identifier: Apache-2.0
"""JAX: one FFI call per tensor that starts its reduction, and one for all of them that completes it."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax._src import (
    core,
    dispatch,
    xla_bridge,  # the only way to ask whether JAX has started
)
from jax.interpreters import mlir

from keras_hpc.backends import jax_chain, jax_compiling, jax_exchange, jax_ordered, jax_refusals, library_path
from keras_hpc.backends import jax_pieces as pieces  # noqa: F401 (others use it)
from keras_hpc.backends.jax_chain import begin_update as begin_update
from keras_hpc.backends.jax_device import number_of_gpu
from keras_hpc.backends.jax_device import sees_gpus as sees_gpus
from keras_hpc.backends.jax_device import use_device as use_device
from keras_hpc.backends.jax_exchange import after as after
from keras_hpc.job import current

# Without one, `done` would block one of the few threads that XLA computes with.
NEEDS_THREAD = True
# Programs reach the engine with buffers of the device only.
PLANS_ON_GPU = True
PLATFORM_OF_GPU = "gpu"

# Handlers; those of buffers on a GPU end in "_on".
_START, _DONE = "khpc_jax_start", "khpc_jax_done"
_TURN, _SECOND = "khpc_jax_turn", "khpc_jax_second"
_LOCAL = "khpc_jax_local_begin", "khpc_jax_local_anchor"
_START_ON, _WAIT_ON = "khpc_jax_start_on", "khpc_jax_wait_on"
_TURN_ON, _SECOND_ON = "khpc_jax_turn_on", "khpc_jax_second_on"
_ON_HOST = (_START, _DONE, _TURN, _SECOND, jax_ordered.TARGET, jax_exchange.TARGET, *_LOCAL)
ON_GPU = (_START_ON, _WAIT_ON, _TURN_ON, _SECOND_ON, jax_ordered.TARGET_ON)


@functools.cache
def load() -> None:
    """Register the FFI handlers. Start JAX's backends.

    Raises:
        RuntimeError: JAX computes on something else than one CPU device or the GPU that was chosen.
        ImportError: the library does not fit this JAX.
    """
    # Only with the CPU backend running is a handler registered, or refused, at once. Registered earlier, a handler
    # that XLA refuses would take the whole CPU backend with it when that starts.
    devices = jax.local_devices()
    if len(devices) != 1 or devices[0].platform != ("cpu" if number_of_gpu() is None else PLATFORM_OF_GPU):
        raise RuntimeError(
            "keras_hpc drives one device per rank: a GPU, which init() chooses, or one host device of the CPU. Call "
            "init() before anything is computed; for the CPU say init(device='cpu'), and ask XLA for one host device. "
            f"Received: {devices}"
        )
    path = library_path("keras_hpc_jax")
    library = ctypes.CDLL(path)
    platform = "cpu" if devices[0].platform == "cpu" else "CUDA"
    for name in _ON_HOST if number_of_gpu() is None else ON_GPU:
        try:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform=platform)
        except jax.errors.JaxRuntimeError as error:
            raise ImportError(f"{path} does not fit jax {jax.__version__}: {error}") from error
    jax_compiling.watch()


def limit_threads(count: int, teams: int = 1) -> tuple[list[str], list[str]]:
    """Limits the threads that XLA computes with, where the user has not set them. Before JAX starts its backends.

    Args:
        count: how many threads.
        teams: not needed: XLA runs one program at a time.

    Returns:
        What was set, and what could not be.
    """
    if "NPROC" in os.environ:
        return [], []
    if xla_bridge.backends_are_initialized():
        return [], ["XLA's threads"]
    os.environ["NPROC"] = str(count)  # XLA's name for the size of its pool
    return [f"{count} XLA threads"], []


def device_of(tensors: Sequence[Any], pipelined: bool = False) -> int | None:
    """Return the number of the GPU on which JAX computes; None: the CPU."""
    return number_of_gpu()


def reduce(plan: Any, tensors: Sequence[Any], weight: Any = None, active: Any = None) -> list[jax.Array]:
    """Reduces the tensors of a plan over the ranks of its team.

    Collective. XLA starts each reduction when its tensor exists and does what depends on the results after all of
    them. Start and completion must be in one program; outside of `jax.jit` a program of their own serves.

    Args:
        plan: the `Plan` of these tensors.
        tensors: one array for each of the plan's, in its order, of the same shape and dtype.
        weight: this rank's weight in a weighted mean, a number or a scalar array. Defaults to 1.
        active: `None`, or a scalar bool array, the same on all ranks: if false, nothing is communicated and the
            tensors are returned unchanged.

    Returns:
        The reduced arrays, in the plan's order.
    """
    return _run(_start_and_done, plan, tensors, weight, active)


def gather(plan: Any, tensors: Sequence[Any], active: Any = None) -> list[jax.Array]:
    """The same for a plan each of whose tensors one rank gives."""
    return _run(_gather, plan, tensors, None, active)


def turn(
    plan: Any, tensors: Sequence[Any], weight: Any = None, active: Any = None
) -> tuple[list[jax.Array], jax.Array]:
    """The same for a pipelined plan.

    Returns:
        What the first update of this step applies, and how many updates it makes, a scalar array: 0, 1 or 2; 0 too if
        `active` is false.
    """
    *reduced, updates = _run(_start_and_turn, plan, tensors, weight, active)
    return reduced, updates


def repeat(plan: Any, updates: Any, reduced: Sequence[Any], state: Any, update: Callable[[Any, list[Any]], Any]) -> Any:
    """Make the updates of a step: call `update(state, gradients)`, which returns the next state. Collective."""
    if not any(map(is_traced, (*reduced, updates))):
        for number in range(int(updates)):
            reduced = reduced if number == 0 else jax.block_until_ready(_second_program(plan.id)(list(reduced)))
            state = update(state, list(reduced))
        return state

    def body(carry: Any) -> Any:
        number, gradients, values = carry
        gradients = jax.lax.cond(number == 0, lambda given: given, functools.partial(_second, plan.id), gradients)
        after = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), update(values, gradients), values)
        return number + 1, gradients, after

    start = (jnp.int32(0), list(reduced), jax.tree.map(jnp.asarray, state))
    return jax.lax.while_loop(lambda carry: carry[0] < updates, body, start)[2]


def _run(program: Callable[..., Any], plan: Any, tensors: Sequence[Any], weight: Any, active: Any) -> list[jax.Array]:
    # As programs get them: NumPy's float64 is float32 there, half as large as it says, unless x64 is on.
    tensors = list(map(jnp.asarray, tensors))
    for x, spec in zip(tensors, plan.tensors, strict=True):
        if x.dtype.name != spec.dtype or tuple(x.shape) != tuple(spec.shape):
            raise spec.misfit(x.shape, x.dtype.name)
    if number_of_gpu() is not None and plan.is_idle:
        return tensors
    if number_of_gpu() is not None and plan.device is None:
        raise RuntimeError(
            f"The plan '{plan.name}' cannot use the GPU, as was said when it was made. On JAX nothing else can reduce "
            "what is on it. Use init(device='cpu'), or mend what the message said."
        )
    # Without x64, float64 is float32 here, which is exact for sample counts below 2^24.
    weight = jnp.asarray(1.0 if weight is None else weight, jnp.result_type(float))
    if number_of_gpu() is None or active is not None:
        active = jnp.asarray(True if active is None else active, bool)
    if any(map(is_traced, (*tensors, weight, active))):
        results: list[jax.Array] = program(plan.id, tensors, weight, active)
        return results
    # Ranks agree on the order of reductions because each is complete before the next begins.
    results = jax.block_until_ready(_program(program, plan.id)(tensors, weight, active))
    return results


def allreduce(team: Any, x: Any, op: str, what: str) -> jax.Array:
    """Reduce an array over the ranks of a team. Collective; inside `jax.jit` where the program runs.

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
    team.settle = jax.effects_barrier  # programs run beside Python: what Python calls next must come after them
    return jax_ordered.allreduce(x, team.id, op, what)


def exchange(exchange: Any, x: Any, axis: int, order: Any) -> jax.Array:
    """Return this rank's window of an array that is split among the ranks of a group. Collective."""
    return jax_exchange.exchange(_call, exchange, x, axis, order)


def with_borders(*what: Any) -> jax.Array:
    """Return a convolution of this rank's rows, with what rows of other ranks add to it. Collective."""
    return jax_exchange.with_borders(_call, *what)


def mark(name: str) -> None:
    """Put a name with the time of now into JAX's profile, if one is being made."""
    with jax.profiler.TraceAnnotation(name):
        pass


def in_program() -> bool:
    """Return whether this is inside a transformation such as `jax.jit`."""
    return not core.trace_state_clean()


def code_is_compiled() -> bool:
    """Return False: JAX traces values, not code."""
    return False


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as it is."""
    return function


def differentiable(
    reduced: Callable[[Any], Any], gradient: Callable[[Any, Any], Any], keeps: bool, x: Any
) -> jax.Array:
    """Return `reduced(x)`, with a gradient: `gradient(upstream, values)`, where `values` are x and the result.

    Only if `keeps`, else None.
    """

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def result(x: Any, earlier: Any) -> Any:
        jax_chain.note(earlier)  # where this becomes a program inside of the program
        return reduced(x)

    def forward(x: Any, earlier: Any) -> Any:
        y = result(x, earlier)
        jax_chain.note([y])
        return y, (x, y) if keeps else None

    result.defvjp(forward, lambda values, upstream: (gradient(upstream, values), None))
    y: jax.Array = result(x, jax_chain.before())
    if in_program():
        jax_chain.note([y])
    return y


def wants_gradient(x: Any) -> bool:
    """Return whether `x` may be differentiated: where it is traced."""
    return in_program()


def from_numpy(array: np.ndarray, like: Any) -> jax.Array:
    """Return an array of JAX with a copy of NumPy's values."""
    return jnp.array(array)


def adopt(array: np.ndarray) -> jax.Array:
    """Return an array of JAX with NumPy's memory, if it is aligned to 64 bytes."""
    return jax.dlpack.from_dlpack(array) if array.dtype.isbuiltin == 1 else jnp.array(array)


def is_traced(x: Any) -> bool:
    """Return whether `x` stands for a value inside a transformation such as `jax.jit`."""
    return isinstance(x, jax.core.Tracer)


def view(x: Any) -> np.ndarray:
    """Return the value of an array or variable, to be read at once."""
    return np.asarray(getattr(x, "value", x))


def to_numpy(x: Any) -> np.ndarray:
    """Return a copy of the value of an array or variable."""
    return np.array(view(x))


def assign(variable: Any, value: np.ndarray) -> None:
    """Set a variable."""
    # JAX may go on reading NumPy's memory, or use it as its own, after it has returned. So it gets its own copy.
    variable.assign(jnp.asarray(np.array(value)))


@functools.cache
def _program(program: Callable[..., Any], plan: int) -> Any:
    return jax.jit(functools.partial(program, plan))


@functools.cache
def _second_program(plan: int) -> Any:
    return jax.jit(functools.partial(_second, plan))


def _on_gpu(
    plan: int, tensors: Sequence[Any], weight: Any, active: Any, wait: Callable[..., Any], idle: Callable[..., Any]
) -> list[jax.Array]:
    """Start all tensors, and wait; or, where `active` is false, be idle. No handler reads a scalar on the GPU."""
    others = [weight, *jax_chain.before(), *jax_chain.updated()]

    def communicate(tensors: Sequence[Any]) -> list[jax.Array]:
        started = [_call(_START_ON, [x], others, plan=plan, tensor=i)[0] for i, x in enumerate(tensors)]
        reduced: list[jax.Array] = wait(started)
        return reduced

    results: list[jax.Array] = (
        communicate(tensors) if active is None else jax.lax.cond(active, communicate, idle, list(tensors))
    )
    jax_chain.note(results)
    return results


def _start_and_done(
    plan: int, tensors: Sequence[Any], weight: Any, active: Any, *, weights: bool = False
) -> list[jax.Array]:
    if number_of_gpu() is not None:
        wait = functools.partial(_call, _WAIT_ON, others=[], plan=plan)
        return _on_gpu(plan, tensors, weight, active, wait, list)
    buffers, earlier = _started(plan, tensors, weight, active)
    results = _call(_DONE, buffers, [*earlier, active], plan=plan)
    jax_chain.note(results, weights, plan)
    return results


def _gather(plan: int, tensors: Sequence[Any], weight: Any, active: Any) -> list[jax.Array]:
    return _start_and_done(plan, tensors, weight, active, weights=True)


def _start_and_turn(plan: int, tensors: Sequence[Any], weight: Any, active: Any) -> list[jax.Array]:
    updates = core.ShapedArray((), np.dtype(np.int32))
    if number_of_gpu() is not None:
        wait = functools.partial(_call, _TURN_ON, others=[], more=[updates], plan=plan)
        return _on_gpu(plan, tensors, weight, active, wait, lambda tensors: [*tensors, jnp.int32(0)])
    buffers, earlier = _started(plan, tensors, weight, active)
    results = _call(_TURN, buffers, [active, *earlier], [updates], plan=plan)
    jax_chain.note(results, plan=plan)
    return results


def _started(plan: int, tensors: Sequence[Any], weight: Any, active: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the buffers of a plan that is started, and what its end has to come after."""
    earlier = jax_chain.before()
    waits = jax_chain.programs_differ() or jax_chain.has_ended(plan)
    others = [weight, active, *(earlier if waits else ()), *jax_chain.updated()]
    return [_call(_START, [x], others, plan=plan, tensor=i)[0] for i, x in enumerate(tensors)], earlier


def _second(plan: int, buffers: Sequence[Any]) -> list[jax.Array]:
    return _call(_SECOND if number_of_gpu() is None else _SECOND_ON, buffers, [], plan=plan)


def _call(
    target: str, buffers: Sequence[Any], others: Sequence[Any], more: Sequence[Any] = (), **attributes: int
) -> list[jax.Array]:
    """Call a handler that changes `buffers` in place and may have `more` results."""
    results: list[jax.Array] = _handler_p.bind(
        *buffers, *others, target=target, changed=len(buffers), more=tuple(more), **attributes
    )
    return results


# XLA is told of side effects, so it neither removes a call nor merges two. JAX is not: it would run each program that
# has them through Python, tens of microseconds per gradient.
_handler_p = jax_refusals.refusing(jax.extend.core.Primitive("keras_hpc_handler"))
_handler_p.multiple_results = True
_handler_p.def_impl(functools.partial(dispatch.apply_primitive, _handler_p))
_handler_p.def_abstract_eval(
    lambda *xs, changed, more, **_: [*(core.ShapedArray(x.shape, x.dtype) for x in xs[:changed]), *more]
)


def _lower_handler(
    ctx: Any, *xs: Any, target: str, changed: int, more: Sequence[Any], **attributes: int
) -> Sequence[Any]:
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases={i: i for i in range(changed)})
    results: Sequence[Any] = rule(ctx, *xs, **{name: np.int32(value) for name, value in attributes.items()})
    return results


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(_handler_p, _lower_handler, platform=_platform)


def outside_programs() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which what is given values has values, also while a function is traced."""
    context: contextlib.AbstractContextManager[Any] = jax.ensure_compile_time_eval()
    return context


def check_when_run(check: Callable[..., None], *values: Any) -> None:
    """Call `check` whenever the function that is being traced runs, or now; what it raises ends that run.

    Args:
        check: gets arrays.
        values: arrays.
    """
    current.before_leaving_local(jax.effects_barrier)
    jax.debug.callback(check, *values, ordered=False)
