# SPDX-License-Identifier: Apache-2.0
"""An update of a sharded optimizer: each rank updates its pieces with the optimizer itself, then all get all weights.

What is updated is what the optimizer would update, with the same operations on the same numbers, so the weights have
the same bits as without. Gradients come here reduced, each rank's pieces at least (`takers.py`). Norms of them, for
clipping, are those of whole gradients, on every rank; only then each takes its pieces.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.plan import TensorSpec
from keras_hpc.keras_hooks import keras_private, running
from keras_hpc.keras_hooks.sharded import shards as sharding
from keras_hpc.keras_hooks.sharded.layout import Piece
from keras_hpc.keras_hooks.sharded.shards import Shards
from keras_hpc.keras_hooks.state import variables as model_variables


def install(job: Any, patcher: Any) -> None:
    """Hooks how optimizers are built and applied. Before what reduces gradients, which is to come around it."""
    if not job.shard_optimizer:
        return
    base = keras_private.get(keras_private.OPTIMIZER)
    patcher.patch(base, "build", _build)
    patcher.patch(base, "add_variable_from_reference", _add_variable)
    patcher.patch(keras.optimizers.Optimizer, "assign", _assign)
    patcher.patch(base, "apply", _apply)
    patcher.patch(base, "finalize_variable_values", _finalize)
    if keras.backend.backend() == "jax":
        patcher.patch(keras_private.get(keras_private.LOSS_SCALE_OPTIMIZER), "stateless_apply", _in_branches)


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build(self: Any, variables: Any) -> Any:
        if sharding.wanted(self) and sharding.of(self) is None:
            current.job().known.optimizer(self).shards = Shards(self, variables)
        return original(self, variables)

    return build


def _add_variable(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_variable_from_reference(
        self: Any, reference_variable: Any, name: Any = None, initializer: Any = "zeros"
    ) -> Any:
        shards = sharding.of(self)
        if shards is None:
            return original(self, reference_variable, name, initializer)
        return shards.make_slot(original, self, reference_variable, name, initializer)

    return add_variable_from_reference


def _assign(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def assign(self: Any, variable: Any, value: Any) -> None:
        shards = sharding.of(self)
        first = shards is not None and not shards.is_complete  # a `build` lets a slot begin with its variable's value
        original(self, variable, shards.first_value(variable, value) if shards is not None and first else value)

    return assign


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        shards = shards_for_update(self, trainable_variables)
        if shards is None or len(grads) == 0:
            return original(self, grads, trainable_variables)
        given = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        positions = [shards.index_of(variable) for variable in given]
        if None in positions or len(grads) != len(given):
            return original(self, grads, trainable_variables)  # which says what is wrong
        update(original, self, shards, list(grads), [p for p in positions if p is not None])
        return None

    return apply


def _in_branches(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        updated = original(self, optimizer_variables, grads, trainable_variables)
        # Only one branch changes weights, so none of these can be had without the `cond`.
        changed = [new for new, gradient in zip(updated[0], grads, strict=True) if gradient is not None]
        backends.current().pieces.wait_for_branches(changed)
        return updated

    return stateless_apply


def shards_for_update(optimizer: Any, variables: Any) -> Shards | None:
    """Return how an optimizer that is about to update is shared out; it is built, if it was not.

    Raises:
        RuntimeError: it is whole where it should not be, or the other way round.
    """
    wanted = sharding.wanted(optimizer)
    if wanted and not optimizer.built and variables is not None:
        with keras.name_scope(optimizer.name):
            optimizer.build(list(variables))
        optimizer.built = True
    shards = sharding.of(optimizer)
    if shards is not None and not wanted:
        raise RuntimeError(
            f"The optimizer {optimizer.name!r} is sharded: its update needs all ranks. Expected it outside of "
            "keras_hpc.local(). Compile a copy of the model for one rank alone, inside of it."
        )
    if shards is None and wanted and optimizer.built:
        raise RuntimeError(
            f"The optimizer {optimizer.name!r} was built before keras_hpc.init(shard_optimizer=True), or inside of "
            "keras_hpc.local(), so each rank has all of its state. Expected that it is built, or its model loaded, "
            "after the one and outside of the other."
        )
    if shards is not None and shards.team is not current.team_of(optimizer):
        raise RuntimeError(
            f"The optimizer {optimizer.name!r} was built for another team. Call keras_hpc.assign_team, or "
            "keras_hpc.configure_team, right after compile."
        )
    return shards


def update(
    original: Callable[..., Any], optimizer: Any, shards: Shards, gradients: list[Any], positions: Sequence[int]
) -> None:
    """Update variables on all ranks. Collective on the optimizer's team.

    Args:
        original: Keras' own `apply`.
        optimizer: which holds no others.
        shards: its.
        gradients: means, at least in this rank's pieces, or None.
        positions: of their variables.
    """
    shards.complete(optimizer)
    due = None
    # After any micro-batch averages may overwrite weights, and constraints hold.
    moves = (optimizer.use_ema and optimizer.ema_overwrite_frequency) or any(map(_constraint, shards.variables))
    if optimizer.gradient_accumulation_steps and not moves:
        due = keras.ops.equal((optimizer._iterations + 1) % optimizer.gradient_accumulation_steps, 0)
    backend = backends.current()
    parts = [index for index in positions if _is_part(shards, index)]
    for index in parts:
        mine = shards.mine(index)
        assert mine is not None  # noqa: S101
        backend.pieces.load_piece(shards.stand_ins[index], shards.variables[index], mine)
        _decay_alike(optimizer, shards.variables[index], shards.stand_ins[index])
    with _standing_in(optimizer, shards, gradients, positions):
        original(optimizer, gradients, [shards.stand_ins[index] for index in positions])
    if running.building():
        return
    gather(optimizer, shards, positions, due)
    for index, gradient in zip(positions, gradients, strict=True):
        variable = shards.variables[index]
        constraint = None if gradient is None or len(shards.pieces[index]) < 2 else _constraint(variable)
        if constraint is not None:
            variable.assign(constraint(variable))


def gather(optimizer: Any, shards: Shards, positions: Sequence[int], due: Any = None) -> None:
    """Give all ranks the pieces of variables that each has updated. Collective on the optimizer's team.

    Args:
        optimizer: whose.
        shards: its.
        positions: the variables' numbers.
        due: a scalar bool tensor, the same on all ranks, whether there is something to gather; None: there is.
    """
    wanted = [(index, piece) for index in positions for piece in shards.pieces[index]]
    wanted.sort(key=lambda one: one[1].rank)  # what one rank gives lies together
    if not wanted:
        return
    specs = [_spec(shards, index, piece) for index, piece in wanted]
    key = current.job().known.key_of(optimizer, "optimizer")
    plan = shards.team.plan(f"{key}/weights", specs, op="sum", weighted=False)
    backend = backends.current()
    pieces = [
        backend.pieces.piece_to_give(shards.variables[index], shards.stand_ins[index], piece)
        if piece.rank == shards.team.rank
        else backend.pieces.piece_to_get(shards.variables[index], piece, kept=due is not None)
        for index, piece in wanted
    ]
    whole: dict[int, list[Any]] = {}
    for (index, _), piece in zip(wanted, backend.gather(plan, pieces, active=due), strict=True):
        whole.setdefault(index, []).append(piece)
    for index, found in whole.items():
        if not shards.is_mine(index) or backend.pieces.LEAVES_OUT_UNUSED:
            backend.pieces.put_pieces(shards.variables[index], found)
        if _is_part(shards, index):
            backend.pieces.let_go(shards.stand_ins[index])


def _spec(shards: Shards, index: int, piece: Piece) -> TensorSpec:
    variable = shards.variables[index]
    name = f"{index}: {running.plain_name(variable)} from {piece.start}"
    return TensorSpec(name, piece.shape, model_variables.standard_dtype(variable), piece.rank)


@contextlib.contextmanager
def _standing_in(optimizer: Any, shards: Shards, gradients: Sequence[Any], positions: Sequence[int]) -> Iterator[None]:
    """Inside, an optimizer takes stand-ins for its variables, and of clipped gradients the pieces of this rank."""
    clip, update_step = optimizer._clip_gradients, optimizer._backend_update_step
    kept = [
        index
        for index, gradient in zip(positions, gradients, strict=True)
        if gradient is not None and not getattr(shards.variables[index], "overwrite_with_gradient", False)
    ]

    def clipped(given: Any) -> list[Any]:
        return [_piece_of(shards, index, gradient) for index, gradient in zip(kept, clip(given), strict=True)]

    def updated(given: Any, stand_ins: Any, learning_rate: Any) -> None:
        own = [(g, v) for g, v in zip(given, stand_ins, strict=True) if 0 not in v.shape]
        if not own and shards.cut:  # it may count its steps
            own = list(zip(given, stand_ins, strict=True))[:1]
        if own:
            update_step([g for g, _ in own], [v for _, v in own], learning_rate)

    # Not as attributes that Keras would track.
    own = vars(optimizer)
    before = own["_trainable_variables"]
    own |= {"_trainable_variables": shards.stand_ins, "_clip_gradients": clipped, "_backend_update_step": updated}
    try:
        yield
    finally:
        own["_trainable_variables"] = before
        del own["_clip_gradients"], own["_backend_update_step"]


def _piece_of(shards: Shards, index: int, gradient: Any) -> Any:
    """Return what this rank updates of a gradient."""
    if not shards.pieces[index] or shards.is_mine(index):
        return gradient
    mine, variable = shards.mine(index), shards.variables[index]
    if hasattr(gradient, "dense_shape"):
        if mine is not None and len(mine.shape) < len(variable.shape):
            raise ValueError(
                f"init(shard_optimizer=True) has cut `{variable.path}` within a row, and its gradient is sparse. "
                f"Expected at least 64 rows for each rank, or init(shard_optimizer=False). Received: shape "
                f"{tuple(variable.shape)}"
            )
        return backends.current().pieces.rows_of_sparse(gradient, mine)
    if mine is None:
        return keras.ops.reshape(gradient, (-1,))[:0]
    if len(mine.shape) == len(variable.shape) > 1:
        row = (mine.stop - mine.start) // mine.shape[0]
        return gradient[mine.start // row : mine.stop // row]
    return keras.ops.reshape(gradient, (-1,))[mine.start : mine.stop]


def _is_part(shards: Shards, index: int) -> bool:
    """Return whether this rank updates some of a variable, and others the rest."""
    return len(shards.pieces[index]) > 1 and shards.mine(index) is not None


def _constraint(variable: Any) -> Any:
    return getattr(variable, "constraint", None)


def _decay_alike(optimizer: Any, variable: Any, stand_in: Any) -> None:
    """Let weight decay leave out a stand-in where it leaves out the variable, which users name."""
    native = keras.backend.backend() == "tensorflow"
    asked = model_variables.value_of(variable) if native else variable
    decays = optimizer._use_weight_decay(asked)
    optimizer._exclude_from_weight_decay_cache[optimizer._var_key(stand_in)] = decays


def _finalize(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def finalize_variable_values(self: Any, var_list: Any) -> Any:
        shards = sharding.of(self)
        if shards is None or not self.use_ema:
            return original(self, var_list)
        positions = [i for i in map(shards.index_of, var_list) if i is not None]
        backend = backends.current()
        for index in positions:
            mine = shards.mine(index)
            if mine is not None and _is_part(shards, index):
                backend.pieces.load_piece(shards.stand_ins[index], shards.variables[index], mine)
        original(self, shards.stand_ins)
        gather(self, shards, positions)
        return None

    return finalize_variable_values
