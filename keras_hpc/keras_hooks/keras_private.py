# SPDX-License-Identifier: Apache-2.0
"""Every private Keras name that the hooks touch, and what they cannot work with.

The table is checked when `init()` runs: a Keras whose internals moved gives one clear error then, not a wrong result
later.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import CodeType, ModuleType
from typing import Any

import keras

VERSIONS = "3.10 to 3.15"  # that it was seen in

# Names that other files ask for.
OPTIMIZER = "keras.src.optimizers.base_optimizer:BaseOptimizer"
LOSS_SCALE_OPTIMIZER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"
TRAINER = "keras.src.trainers.trainer:Trainer"
EPOCH_ITERATOR = "keras.src.trainers.epoch_iterator:EpochIterator"
COMPUTE_OUTPUT_SPEC = "keras.src.backend:compute_output_spec"
IN_SYMBOLIC_SCOPE = "keras.src.backend.common.symbolic_scope:in_symbolic_scope"
IS_DEFAULT = "keras.src.utils.python_utils:is_default"
ORBAX_CHECKPOINT = "keras.src.callbacks.orbax_checkpoint:OrbaxCheckpoint"
GLOBAL_SEED_GENERATOR_OF = "keras.src.random.seed_generator:global_seed_generator"
IN_STATELESS_SCOPE = "keras.src.backend.common.stateless_scope:in_stateless_scope"
LOSSES = "keras.src.losses.loss"
APPLY_MASK = f"{LOSSES}:apply_mask"
GET_MASK = "keras.src.backend:get_keras_mask"
SET_MASK = "keras.src.backend:set_keras_mask"
FUNCTION = "keras.src.ops.function:Function"
FUNCTIONAL = "keras.src.models.functional:Functional"

# The module in which a backend draws random numbers, by its name.
RANDOM = "keras.src.backend.{}.random"

# The module in which Keras compiles steps on JAX, with its own name `jit`.
JAX_TRAINER = "keras.src.backend.jax.trainer"

# The module of convolutions on PyTorch.
TORCH_FUNCTIONS = "keras.src.backend.torch.nn"

# How the modules of Keras' own layers begin.
LAYERS = "keras.src.layers."

_LAYER = "keras.src.layers.layer:Layer"
_CALLBACKS = "keras.src.callbacks.callback_list:CallbackList"
BACKEND_TRAINERS = {
    "tensorflow": "keras.src.backend.tensorflow.trainer:TensorFlowTrainer",
    "jax": "keras.src.backend.jax.trainer:JAXTrainer",
    "torch": "keras.src.backend.torch.trainer:TorchTrainer",
}

# Names are `module:attribute`, the attribute may be dotted.
REQUIRED = [
    f"{OPTIMIZER}.__init__",
    f"{OPTIMIZER}.apply",
    f"{OPTIMIZER}._backend_update_step",
    f"{OPTIMIZER}._clip_gradients",
    f"{LOSS_SCALE_OPTIMIZER}.apply",
    f"{LOSS_SCALE_OPTIMIZER}.stateless_apply",
    f"{LOSS_SCALE_OPTIMIZER}.check_finite",
    "keras.src.layers.normalization.batch_normalization:BatchNormalization._moments",
    f"{TRAINER}._get_metrics_result_or_logs",
    f"{TRAINER}._resolve_auto_jit_compile",
    f"{TRAINER}._aggregate_additional_loss",
    f"{TRAINER}._symbolic_build",
    f"{TRAINER}.compute_loss",
    f"{TRAINER}.compute_metrics",
    f"{TRAINER}.compile",
    f"{FUNCTION}._run_through_graph",
    f"{FUNCTIONAL}.input_spec",
    f"{_LAYER}._flatten_layers",
    f"{_CALLBACKS}.on_train_begin",
    f"{_CALLBACKS}.on_epoch_begin",
    f"{_CALLBACKS}.on_epoch_end",
    f"{_CALLBACKS}.on_train_batch_end",
    f"{EPOCH_ITERATOR}.__init__",
    f"{EPOCH_ITERATOR}._enumerate_iterator",
    "keras.src.models.model:Model.load_weights",
    f"{LOSSES}:reduce_weighted_values",
    APPLY_MASK,
    GET_MASK,
    SET_MASK,
    GLOBAL_SEED_GENERATOR_OF,
    "keras.src.backend.common.global_state:get_global_attribute",
    "keras.src.backend.common.global_state:set_global_attribute",
    "keras.src.layers.layer:CallContext",
    COMPUTE_OUTPUT_SPEC,
    IN_STATELESS_SCOPE,
    IN_SYMBOLIC_SCOPE,
    IS_DEFAULT,
]

# The key under which Keras keeps the generator of `keras.random` functions without a seed.
GLOBAL_SEED_GENERATOR = "global_seed_generator"
# That under which it keeps the seed of `keras.utils.set_random_seed`.
GLOBAL_RANDOM_SEED = "global_random_seed"
# What TensorFlow uses beside the seed of an operation where no global one is set.
TENSORFLOW_UNSET_SEED = 87654321

# Present in some versions only: `find` returns None where they are missing.
OPTIONAL = {
    "keras.src.optimizers.multi_optimizer:MultiOptimizer": "not in 3.10, in 3.15",
    "keras.src.callbacks.orbax_checkpoint:OrbaxCheckpoint": "not in 3.10, in 3.15",
}

# Attributes of instances, with the method that must mention them.
REQUIRED_ATTRIBUTES = {
    f"{OPTIMIZER}.__init__": ("_trainable_variables", "_iterations", "gradient_accumulation_steps"),
    f"{OPTIMIZER}.build": ("_accumulated_gradients",),
    f"{OPTIMIZER}._overwrite_variable_with_gradient": ("overwrite_with_gradient",),
    f"{LOSS_SCALE_OPTIMIZER}.__init__": ("inner_optimizer",),
    "keras.src.backend.common.variables:Variable.__init__": ("_value",),
    f"{TRAINER}.__init__": ("_initial_epoch", "_compile_loss"),
    "keras.src.layers.layer:CallContext.__init__": ("entry_layer",),
    f"{FUNCTION}.__init__": ("_inputs", "_outputs_struct", "_nodes_by_depth"),
    "keras.src.models.sequential:Sequential.__init__": ("_functional",),
    f"{_LAYER}.__init__": ("_call_has_training_arg",),
    f"{_LAYER}._get_call_context": ("current_call_ctx",),
    "keras.src.metrics.metric:Metric.__init__": ("_metrics", "_variables"),
    f"{_LAYER}._initialize_tracker": ("_non_trainable_variables", "_seed_generators", "_tracker"),
    f"{_CALLBACKS}.__init__": ("callbacks", "set_model"),
    f"{_CALLBACKS}._add_default_callbacks": ("_history",),
    "keras.src.callbacks.callback:Callback.__init__": ("_model",),
    "keras.src.trainers.epoch_iterator:EpochIterator.__init__": ("_current_iterator", "_steps_seen"),
}


_ADAPTERS = "keras.src.trainers.data_adapters"

# What sharing out data needs, as "module:name".
_DATA = (
    "keras.src.trainers.epoch_iterator:EpochIterator.__init__",
    f"{_ADAPTERS}:is_tf_dataset",
    f"{_ADAPTERS}:is_torch_dataloader",
    f"{_ADAPTERS}.data_adapter:DataAdapter",
    f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter",
    f"{_ADAPTERS}.array_data_adapter:can_convert_arrays",
    f"{_ADAPTERS}.array_slicing:convert_to_sliceable",
    f"{_ADAPTERS}.array_slicing:slice_tensorflow_sparse_wrapper",
    f"{_ADAPTERS}.array_slicing:TensorflowSparseWrapper",
    f"{_ADAPTERS}.data_adapter_utils:get_torch_dataloader",
    f"{_ADAPTERS}.data_adapter_utils:is_tensorflow_sparse",
    f"{_ADAPTERS}.generator_data_adapter:GeneratorDataAdapter",
    f"{_ADAPTERS}.py_dataset_adapter:OrderedEnqueuer",
    f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter._get_iterator",
    f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter._standardize_batch",
    f"{_ADAPTERS}.tf_dataset_adapter:TFDatasetAdapter",
    f"{_ADAPTERS}.torch_data_loader_adapter:TorchDataLoaderAdapter",
)

# Attributes that Keras sets on instances, as "module:class" and the names that its `__init__` must mention.
_DATA_ATTRIBUTES = {
    f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter": ("_inputs",),
    f"{_ADAPTERS}.generator_data_adapter:GeneratorDataAdapter": ("generator",),
    f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter": ("enqueuer", "py_dataset"),
    f"{_ADAPTERS}.torch_data_loader_adapter:TorchDataLoaderAdapter": ("_dataloader", "_num_batches"),
}


def find(name: str) -> Any:
    """Return the object called `module:attribute.attribute`, or None where this Keras has none."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def get(name: str) -> Any:
    """Return the object called `module:attribute`; raises ImportError naming the Keras version where it is gone."""
    found = find(name)
    if found is None:
        raise ImportError(
            f"keras_hpc does not fit Keras {keras.__version__}: `{name}` is missing. Expected Keras {VERSIONS}; "
            f"install one of these, or a newer keras_hpc. Received: keras=={keras.__version__}"
        )
    return found


def adapter(name: str) -> Any:
    """Return a name of Keras' data adapters, `module:attribute`."""
    return get(f"{_ADAPTERS}{'' if name.startswith(':') else '.'}{name}")


def is_of_backend(cls: type) -> bool:
    """Return whether a class is Keras' own for one backend, as its optimizers for PyTorch are."""
    return cls.__module__.startswith("keras.src.backend.")


def stored(key: str) -> Any:
    """Return what Keras keeps under a key for the whole process, or None."""
    return get("keras.src.backend.common.global_state:get_global_attribute")(key)


def store(key: str, value: Any) -> None:
    """Set what Keras keeps under a key for the whole process."""
    get("keras.src.backend.common.global_state:set_global_attribute")(key, value)


def entry_layer() -> Any:
    """Return the outermost layer or model whose call runs in this thread, or None."""
    return getattr(stored("current_call_ctx"), "entry_layer", None)


def tensorflow_seed(tensorflow: Any) -> int | None:
    """Return TensorFlow's global seed, or None where it is not set."""
    found = getattr(*tensorflow_seed_holder(tensorflow))
    return None if found is None else int(found)


def tensorflow_seed_holder(tensorflow: Any) -> tuple[Any, str]:
    """Return the object, and the name of its attribute, with the global seed of operations that are made or run now."""
    if tensorflow.executing_eagerly():
        return importlib.import_module("tensorflow.python.eager.context").context(), "_seed"
    return tensorflow.compat.v1.get_default_graph(), "seed"


def module(name: str) -> ModuleType:
    """Return a module of Keras."""
    return importlib.import_module(name)


def backend_trainer() -> type:
    """Return the trainer class of the active backend."""
    backend = keras.backend.backend()
    if backend not in BACKEND_TRAINERS:
        raise ValueError(
            "keras_hpc trains with the TensorFlow, JAX and PyTorch backends. Set KERAS_BACKEND to one of them. "
            f"Received: {backend!r}"
        )
    trainer: type = get(BACKEND_TRAINERS[backend])
    return trainer


def check() -> None:
    """Assert that Keras is as the hooks expect, and that nobody else averages gradients.

    Raises:
        ImportError: a private name is missing in this Keras version.
        ValueError: the backend is not supported.
        RuntimeError: another way to distribute is active: that of Keras, TensorFlow, JAX or PyTorch.
    """
    trainer = backend_trainer()
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "make_train_function"):
        get(f"{BACKEND_TRAINERS[keras.backend.backend()]}.{name}")
    for name in (*REQUIRED, *_DATA):
        get(name)
    for owner, attributes in REQUIRED_ATTRIBUTES.items():
        _check_mentions(owner, get(owner), attributes)
    for owner, attributes in _DATA_ATTRIBUTES.items():
        _check_mentions(owner, get(owner).__init__, attributes)
    if keras.backend.backend() == "jax":
        _check_mentions(trainer.__name__, trainer.fit, ("_jax_state_synced", "jax_state_sync"))  # type: ignore[attr-defined]
    if keras.backend.backend() == "torch":
        _check_mentions(f"{trainer.__name__}.train_step", trainer.train_step, ("backward", "grad", "apply"))  # type: ignore[attr-defined]
        _check_mentions(trainer.__name__, trainer.make_train_function, ("train_step",))  # type: ignore[attr-defined]
    _refuse_other_distribution()


def activity_loss_is_per_sample() -> bool:
    """Return whether this Keras divides activity regularization by the batch size (it began to after 3.10)."""
    return "divide_no_nan" in names_in(get(f"{_LAYER}.__call__"))


_FRAMEWORKS = "keras", "keras_hpc", "tensorflow", "torch", "jax", "numpy"


def names_in(function: Any) -> set[str]:
    """Return all names and strings that a function and the functions inside it mention."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    found: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        found.update(code.co_names, code.co_freevars, (c for c in code.co_consts if isinstance(c, str)))
        codes.extend(c for c in code.co_consts if isinstance(c, CodeType))
    # A decorated function without `__wrapped__` is reached through its closure.
    for cell in function.__closure__ or ():
        if callable(cell.cell_contents) and hasattr(cell.cell_contents, "__code__"):
            found |= names_in(cell.cell_contents)
    return found


def names_in_own(cls: type) -> set[str]:
    """Return all names that methods of a class mention, and functions that these call; not those of a framework."""
    own = [vars(base).values() for base in cls.__mro__ if not base.__module__.startswith("keras.")]
    functions = [inspect.unwrap(value) for values in own for value in values if inspect.isfunction(value)]
    found: set[str] = set()
    for function in functions:  # which become more
        names = names_in(function)
        functions += [called for called in _called(function, names) if called not in functions]
        found |= names
    return found


def _called(function: Any, names: set[str]) -> list[Any]:
    """Return the functions outside of a function, but not of a framework, that it mentions with these names."""
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    known += [vars(module).get(name) for module in known if inspect.ismodule(module) for name in names]
    functions = [inspect.unwrap(value) for value in known if inspect.isfunction(value)]
    return [one for one in functions if one.__module__.split(".")[0] not in _FRAMEWORKS]


def _check_mentions(owner: str, function: Any, attributes: tuple[str, ...]) -> None:
    missing = [name for name in attributes if name not in names_in(function)]
    if missing:
        raise ImportError(
            f"keras_hpc does not fit Keras {keras.__version__}: `{owner}` has no attribute {missing} any more. "
            f"Expected Keras {VERSIONS}. Received: keras=={keras.__version__}"
        )


def _is_distributed(jax: Any) -> bool:
    if hasattr(jax.distributed, "is_initialized"):
        return bool(jax.distributed.is_initialized())
    return importlib.import_module("jax._src.distributed").global_state.client is not None  # jax 0.5.0


def _refuse_other_distribution() -> None:
    active = keras.distribution.distribution()
    if active is not None:
        raise RuntimeError(
            "A keras.distribution is active, so gradients would be averaged twice. Use either keras_hpc or "
            "keras.distribution: call keras.distribution.set_distribution(None) before keras_hpc.init(). "
            f"Received: {active}"
        )
    tensorflow, jax, torch = map(sys.modules.get, ("tensorflow", "jax", "torch"))
    if tensorflow is not None and tensorflow.distribute.has_strategy():
        raise RuntimeError(
            "A tf.distribute strategy is active, so gradients could be averaged twice. Use either keras_hpc or "
            f"tf.distribute. Received: {tensorflow.distribute.get_strategy()}"
        )
    if jax is not None and _is_distributed(jax):
        raise RuntimeError(
            "jax.distributed is initialised, so the processes would share arrays, too. Use either keras_hpc or "
            f"jax.distributed. Received: {jax.process_count()} processes"
        )
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised, so gradients could be averaged twice. Use either keras_hpc or "
            "torch.distributed: do not call torch.distributed.init_process_group() in a keras_hpc job. "
            f"Received: backend {torch.distributed.get_backend()!r}, {torch.distributed.get_world_size()} processes"
        )
