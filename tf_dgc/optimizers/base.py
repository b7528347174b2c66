"""Base class of the optimizers that wrap another one, with what Keras requires."""

import inspect
import itertools
import warnings
import zlib
from collections.abc import Callable, Sequence, Set
from typing import Any, ClassVar, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import (
    keras_optimizers,
    optimizer_copies,
    save_hooks,
)
from tf_dgc._internals.optimizer_copies import NameReference
from tf_dgc.arguments import show
from tf_dgc.multiworker import consensus, keras_saving, tf_config, worker_parts
from tf_dgc.multiworker.worker_variables import (
    SAME_CHECKPOINT,
    PerWorkerVariable,
    ReplicaCopies,
)
from tf_dgc.optimizers.config import EXCLUDED, Exclusions, parse_config
from tf_dgc.optimizers.inner_hyperparameters import (
    InnerHyperparameters,
    Serialize,
    check_settings,
    describe,
    describe_constructor,
    settings_of_optimizer,
)


def _delegated_setting(name: str) -> Any:
    """Return a property of a wrapper that reads and sets one of `SHARED_SETTINGS`."""

    def read(wrapper: Any) -> Any:
        return wrapper.read_setting(name)

    def change(wrapper: Any, value: Any) -> None:
        # Keras's constructor sets these before there is an inner optimizer.
        if hasattr(wrapper, "inner_optimizer"):
            wrapper.change_setting(name, value)

    return property(read, change, doc=f"`{name}` of the inner optimizer.")


class OptimizerWrapper(save_hooks.CheckpointHooks):
    """A Keras optimizer whose update is applied by an inner one.

    Learning rate, iterations and all settings that Keras optimizers have in common are
    those of the inner optimizer, or were taken from it; the wrapper has them as its
    attributes. As in Keras, a changed setting acts on steps that are traced afterwards:
    change it before `fit`, or compile the model again.

    Args:
        inner_optimizer: optimizer that applies the update to gradients that are already
            summed over the workers; its own all-reduce is turned off.
        hyperparameters: hyperparameters that the wrapper applies instead.
        exclusions: variables that are excluded from compression.
        name: name of the optimizer.
        strategy: strategy in whose scope it is created, prepared.
    """

    saved_by_all_workers = True  # each saves a part
    backup_subfolder = ""  # subfolder of a worker that backs up without the others
    config_keys: ClassVar[tuple[str, ...]] = ()  # constructor arguments that are saved
    fixed: Set[str] = frozenset()  # constructor arguments that cannot change
    steps_locally = False  # whether the inner optimizer takes local steps

    weight_decay = _delegated_setting("weight_decay")
    clipnorm = _delegated_setting("clipnorm")
    global_clipnorm = _delegated_setting("global_clipnorm")
    clipvalue = _delegated_setting("clipvalue")
    use_ema = _delegated_setting("use_ema")
    ema_momentum = _delegated_setting("ema_momentum")
    ema_overwrite_frequency = _delegated_setting("ema_overwrite_frequency")
    loss_scale_factor = _delegated_setting("loss_scale_factor")
    gradient_accumulation_steps = _delegated_setting("gradient_accumulation_steps")

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        hyperparameters: InnerHyperparameters,
        exclusions: Exclusions,
        name: str,
        strategy: tf.distribute.Strategy,
    ):
        super().__init__(learning_rate=lambda: inner_optimizer.learning_rate, name=name)
        keras_optimizers.share_iterations(self, inner_optimizer)
        keras_optimizers.replace_all_reduce(inner_optimizer, list)
        self._hyperparameters = hyperparameters
        self._exclusions = exclusions
        self._strategy = strategy
        self._trains_nothing = False
        self._is_loaded = True  # if not, Keras must not load the inner optimizer either
        keras_optimizers.load_only_if(inner_optimizer, lambda: self._is_loaded)
        # Checkpoints contain the name of this attribute.
        self._form = save_hooks.SavedNote(
            lambda: self._describe_state().to_numbers(),
            lambda numbers: self._check_state(StateDescription.from_numbers(numbers)),
        )
        self.inner_optimizer = inner_optimizer

    # Settings and variables

    def read_setting(self, name: str) -> Any:
        """Return one of `SHARED_SETTINGS`, as the user set it."""
        if name in self._hyperparameters.values:
            return self._hyperparameters.values[name]
        return getattr(self.inner_optimizer, name)

    def change_setting(self, name: str, value: Any) -> None:
        """Set one of `SHARED_SETTINGS`.

        Raises:
            ValueError: for values that the constructor rejects too; if the optimizer is
                built, for `use_ema` and `gradient_accumulation_steps`.
        """
        _check_setting_change(self, name, value, self.steps_locally)
        if name in self._hyperparameters.values:
            self._hyperparameters.values[name] = value
        else:
            setattr(self.inner_optimizer, name, value)

    @property
    def iterations(self) -> Any:
        """Steps of the inner optimizer; where it accumulates, Keras's quotient."""
        return keras_optimizers.readable_scalar(self.inner_optimizer.iterations)

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return keras_optimizers.readable_scalar(self.inner_optimizer.learning_rate)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of this optimizer and of the inner one.

        Empty while a part of a backup is written or read: `LossScaleOptimizer` would
        add up all workers' variables, in addition to what this optimizer saves.
        """
        if worker_parts.part_being_written() or worker_parts.part_being_read():
            return []
        variables = keras_optimizers.own_variables(self)
        ids = {id(v) for v in variables}
        return variables + [
            v for v in self.inner_optimizer.variables if id(v) not in ids
        ]

    @property
    def differing_variables(self) -> list[keras.Variable]:
        """Plain variables, including the model's, whose values differ by worker."""
        return []

    @property
    def wrapped_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Optimizers that Keras saves in addition to this one."""
        return [self.inner_optimizer]

    @property
    def _model_variables_moving_average(self) -> Any:
        # `SwapEMAWeights` looks no deeper than the optimizer within a loss scale.
        return self.inner_optimizer._model_variables_moving_average

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """See `keras.optimizers.Optimizer.exclude_from_weight_decay`."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def exclude_from_compression(
        self,
        var_list: Sequence[keras.Variable] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Send these variables uncompressed, like small ones.

        `ServerOptimizer` also receives them uncompressed.

        Like Keras's `exclude_from_weight_decay`. Call it on every worker, before the
        optimizer is built. The config contains it.

        Args:
            var_list: variables of the model.
            var_names: regular expressions, searched in the variables' paths.

        Raises:
            ValueError: if the optimizer is built, and for other arguments.
        """
        if self.built:
            raise ValueError(
                "`exclude_from_compression` must be called before the optimizer is "
                "built, which `build`, `fit` and the first step do. "
                f"Received: {self!r}, which is built"
            )
        self._exclusions.add(var_list, var_names)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let the inner optimizer set final values (moving averages)."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def set_weights(self, weights: Sequence[np.ndarray[Any, Any]]) -> None:
        """Set all of `variables`; call it on every worker.

        Args:
            weights: one value for each, for example `[v.numpy() for v in variables]`.
                For state that differs between workers, the value is the sum over
                workers, and every worker gets an equal share.

        Raises:
            ValueError: before the optimizer is built, and for other numbers or shapes.
        """
        shapes = [tuple(v.shape) for v in self.variables]
        if not self.built or [np.shape(w) for w in weights] != shapes:
            raise ValueError(
                "`set_weights` needs a built optimizer and one value for each of its "
                f"`variables`, in their order. Received: {len(weights)} values of "
                f"shapes {[np.shape(w) for w in weights]}; built={self.built}, with "
                f"{len(shapes)} variables of shapes {shapes}"
            )
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def __setattr__(self, name: str, value: Any) -> None:
        _check_attribute(self, name, value, self.fixed)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        public = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return describe_constructor(type(self), public, *self._repr_arguments())

    def _repr_arguments(self) -> list[str]:
        """Return the wrapped optimizers as `repr` shows them."""
        inner = keras_optimizers.arguments_of(self.inner_optimizer)
        inner.update(self._hyperparameters.values)
        return [describe_constructor(type(self.inner_optimizer), inner)]

    # Build

    def check_copies(self) -> None:
        """Raise `ValueError` if a function would read the optimizer that was copied.

        Call it before the first step, when the name may already refer to the wrapper.
        """
        for optimizer in self.wrapped_optimizers:
            for reference in optimizer_copies.name_references(optimizer):
                _check_reference(self, reference)

    def build_without_variables(self) -> None:
        """Build the optimizer for a frozen model, as Keras does."""
        self._trains_nothing = True  # a saved state is not loaded
        for optimizer in self.wrapped_optimizers:
            optimizer.build([])
        keras_optimizers.remember_variables(self, [])

    # Save and load

    def in_checkpoint(self) -> None:
        """Complete a checkpoint on all workers only when it is complete on one."""
        keras_saving.finish_checkpoint_together(self._strategy)

    def save_own_variables(self, store: Any) -> None:
        """Save the state of all workers; call it on every worker.

        In a backup, this worker's state goes to its part, and no other worker is
        contacted. Keras saves the inner optimizer separately.

        Raises:
            ValueError: on all workers, if two of them write to the same file.
            RuntimeError: if a worker does not come within `TF_DGC_TIMEOUT` seconds.
        """
        part = worker_parts.part_being_written()
        if part is None:
            keras_saving.finish_save_together(self._strategy)
        mark_store(store, self._describe_state())
        for i, variable in enumerate(self._saved_variables()):
            if not isinstance(variable, PerWorkerVariable | ReplicaCopies):
                store[str(i)] = variable.numpy()
            elif part is None:
                store[str(i)] = variable.gather()
            else:
                store[str(i)] = part.put(variable.gather(local=True))

    def load_own_variables(self, store: Any) -> None:
        """Load the state; call it on every worker, with the same file or a copy of it.

        If another number of workers saved it, it is divided: see
        `worker_variables.restored_share`. As in Keras, the state of another package's
        optimizer is skipped with a warning; so is a state from before any step, if this
        optimizer has taken steps.

        Raises:
            ValueError: if it was saved with other settings (for example without
                momentum correction, or with `use_ema` of the inner optimizer), or this
                optimizer is not yet built, so that the residual would be lost; and on
                all workers, if they load different files.
            RuntimeError: if a worker does not come within `TF_DGC_TIMEOUT` seconds.
        """
        self._is_loaded = False
        variables = self._saved_variables()
        if not self._should_load(store, len(variables)):
            return
        numbers = [int(number) for number in _read_saved(store, _MARK)]
        self._check_state(StateDescription.from_numbers(numbers))
        self._is_loaded = True
        part = worker_parts.part_being_read()
        for i, variable in enumerate(variables):
            values = _read_saved(store, str(i))
            if part is not None and isinstance(
                variable, PerWorkerVariable | ReplicaCopies
            ):
                values = part.take(values)
            if isinstance(variable, ReplicaCopies):
                self.restore_copies(variable, values)
            elif isinstance(variable, PerWorkerVariable):
                variable.scatter(values)
            else:
                variable.assign(values)
        if part is not None:
            return  # the workers have already compared the backup
        checksums = (saved_checksum(store, name) for name in saved_names(store))
        consensus.require_equal(
            self._strategy,
            lambda: {"checksum of the saved state": list(checksums)},
            SAME_CHECKPOINT,
        )

    def restore_copies(
        self, copies: ReplicaCopies, values: np.ndarray[Any, Any]
    ) -> None:
        """Restore one of `differing_variables` from all workers' values, `[N, ...]`."""
        copies.scatter(values, "mean")

    def _saved_variables(self) -> list[Any]:
        """Return this optimizer's variables, and the copies of those that differ."""
        differing = self.differing_variables
        ids = {id(v) for v in differing}
        variables = keras_optimizers.own_variables(self)
        equal = (v for v in variables if id(v) not in ids)
        return [*equal, *map(self._copies_of, differing)]

    def _copies_of(self, variable: keras.Variable) -> ReplicaCopies:
        return ReplicaCopies(self._strategy, variable.value)

    def _should_load(self, store: Any, num_variables: int) -> bool:
        """Return whether to load a state; warn or raise if skipping it loses something.

        Raises:
            ValueError: for a state of this package with other variables.
        """
        class_name = type(self).__name__
        names = saved_names(store)
        if names == ["0"] and np.array_equal(_read_saved(store, "0"), 0):
            # Only the iterations, and there were none: an unbuilt optimizer.
            if int(self.iterations):
                _warn_not_loaded("it was saved before any step, and this one's is kept")
            return False
        if _MARK not in set(store.keys()):
            reason = "it is not of this package" if names else "there is none"
            _warn_not_loaded(f"{reason}, and {class_name} stays as it is")
            return False
        if self._trains_nothing:
            _warn_not_loaded("the model has no trainable variables")
            return False
        if len(names) == num_variables:
            return True
        if not self.built:
            raise ValueError(
                f"This {class_name} is not yet built, so its saved state would be "
                "lost. Before loading, `with strategy.scope(): "
                "model.optimizer.build(model.trainable_variables)`; or load without "
                "the state, by `load_weights(path, skip_mismatch=True)` or before "
                "`compile`."
            )
        raise ValueError(_other_variables(class_name, len(names), num_variables))

    def _describe_state(self) -> "StateDescription":
        return describe_state(
            self._hyperparameters.scale_before_accumulation,
            getattr(self, "fragments", 1),
            len(keras_optimizers.own_variables(self)) if self.built else 0,
            self.wrapped_optimizers,
        )

    def _check_state(self, saved: "StateDescription") -> None:
        check_compatible(saved, self._describe_state(), type(self).__name__)

    # Config and copies

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the current learning rate.

        Raises:
            NotImplementedError, TypeError: as in Keras, for a learning-rate schedule or
                another object that has no config.
        """
        return self.collect_config(keras.saving.serialize_keras_object)

    def describe_config(self) -> dict[str, Any]:
        """Return `get_config`, with a description of objects that have no config."""
        return self.collect_config(describe)

    def collect_config(self, serialize: Serialize) -> dict[str, Any]:
        """Return the constructor's arguments, each converted by `serialize`."""
        return {
            "name": self.name,
            "inner": self.inner_config(serialize),
            **{key: serialize(getattr(self, key)) for key in self.config_keys},
            EXCLUDED: self._exclusions.get_config(),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Self:
        """Create an optimizer from `get_config`'s dictionary."""
        arguments, exclusions = parse_config(config, custom_objects)
        with tf_config.loading_config():
            optimizer = cls(**arguments)
        optimizer._exclusions.update(exclusions)
        return optimizer

    def inner_config(self, serialize: Serialize) -> dict[str, Any]:
        """Return the config of the optimizer that the user passed as `inner`."""
        inner: dict[str, Any] = serialize(self.inner_optimizer)
        config = inner["config"]
        for name, value in self._hyperparameters.values.items():
            if name in config:
                config[name] = value
        return inner

    def unwrap(self) -> keras.optimizers.Optimizer:
        """Return an unbuilt optimizer like the one that the user passed as `inner`."""
        if self.built:
            return keras.optimizers.get(self.get_config()["inner"])
        inner = optimizer_copies.copy_optimizer(self.inner_optimizer)
        for name, value in self._hyperparameters.values.items():
            setattr(inner, name, value)
        return inner

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copy the settings; as in Keras, not the state."""
        if self.built:
            warnings.warn(
                f"A copy of this {type(self).__name__} has its settings, and begins "
                "without its state.",
                stacklevel=2,
            )
        config = keras.saving.serialize_keras_object(self)
        return keras.saving.deserialize_keras_object, (config,)


# Changed settings and attributes


def _check_setting_change(
    optimizer: keras.optimizers.Optimizer, name: str, value: Any, steps_locally: bool
) -> None:
    """Raise `ValueError` if one of `SHARED_SETTINGS` cannot be set to a value."""
    check_settings({**settings_of_optimizer(optimizer), name: value}, steps_locally)
    if name == "gradient_accumulation_steps" and optimizer.built:
        raise ValueError(
            "`gradient_accumulation_steps` cannot be changed any more: the variables "
            "for it are created when the optimizer is built. Pass it to the inner "
            f"optimizer. Received: gradient_accumulation_steps={show(value)}"
        )
    if name == "use_ema" and optimizer.built and bool(value) != bool(optimizer.use_ema):
        raise ValueError(
            "`use_ema` cannot be changed any more: the averages are created when the "
            "optimizer is built. Pass it to the inner optimizer, for example "
            f"`SGD(0.1, use_ema=True)`. Received: use_ema={show(value)}"
        )


def _check_attribute(
    wrapper: keras.optimizers.Optimizer, name: str, value: Any, fixed: Set[str]
) -> None:
    """Raise `AttributeError` where setting an attribute would have no effect.

    Constructor arguments in `fixed` cannot change.
    """
    if name.startswith("_"):
        return
    class_name, attributes = type(wrapper).__name__, vars(wrapper)
    if name in fixed and name in attributes:
        raise AttributeError(
            f"`{name}` cannot be changed any more: it is a constructor argument, which "
            "the workers have compared. Make another one: "
            f"`{class_name}(..., {name}=...)`. Received: {name}={show(value)}, instead "
            f"of {show(attributes[name])}"
        )
    inner = attributes.get("inner_optimizer")
    if not inner or name in fixed or name in attributes or hasattr(type(wrapper), name):
        return
    if name in inspect.signature(type(inner)).parameters:
        raise AttributeError(
            f"`{name}` is a constructor argument of the inner optimizer, which "
            f"{class_name} has already read. Make another one with a new inner "
            f"optimizer. Received: {name}={show(value)}"
        )
    if hasattr(inner, name):
        raise AttributeError(
            f"`{name}` is an attribute of the inner optimizer, which {class_name} does "
            f"not read. Set `optimizer.inner_optimizer.{name} = ...`. "
            f"Received: {name}={value!r}"
        )


def _check_reference(
    wrapper: keras.optimizers.Optimizer, reference: NameReference
) -> None:
    """Raise `ValueError` if a function reads the user's optimizer, not its copy."""
    if not reference.holds:
        return
    class_name = type(wrapper).__name__
    raise ValueError(
        f"The function `{reference.attribute}` of the inner optimizer reads the global "
        f"name {reference.name!r}, the optimizer that was passed to {class_name}. "
        f"{class_name} copies it, and only the copy takes steps. Assign the "
        f"{class_name} to that name, so that the function reads its `iterations` and "
        "the like; or pass a `keras.optimizers.schedules.LearningRateSchedule`, which "
        "is called with the iterations. Received: "
        f"{reference.function.__qualname__!r} of {reference.function.__module__}"
    )


# The description of a saved state

_MARK = "tf_dgc"  # its key in the store; the variables' keys are "0", "1", ...
_GRADIENTS, _UPDATES = 1, 2  # units of the residual
_BASE_VARIABLES = 2  # iterations and learning rate, which every optimizer may have
_WITHOUT_STATE = (
    "Without the state: `load_model(path, compile=False)`, or `load_weights(path, "
    "skip_mismatch=True)`."
)


class StateDescription(NamedTuple):
    """What a saved state and the optimizer that loads it must have in common.

    Attributes:
        units: units of the residual; updates include the learning rate.
        fragments: number of fragments of the model.
        num_variables: number of the optimizer's variables; 0 if it is not built.
        wrapped: number of variables of each wrapped optimizer, 0 if it is not built,
            and a CRC-32 of their shapes.
    """

    units: int
    fragments: int
    num_variables: int
    wrapped: list[tuple[int, int]]

    def to_numbers(self) -> list[int]:
        """Return the description as it is saved."""
        return [*self[:3], *itertools.chain(*self.wrapped)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "StateDescription":
        """Return the description that `to_numbers` converted."""
        wrapped = list(zip(numbers[3::2], numbers[4::2], strict=True))
        return cls(numbers[0], numbers[1], numbers[2], wrapped)


def describe_state(
    scales_by_learning_rate: bool,
    fragments: int,
    num_variables: int,
    wrapped: Sequence[keras.optimizers.Optimizer],
) -> StateDescription:
    """Return the description of an optimizer's state."""
    shapes = [[tuple(v.shape) for v in o.variables if o.built] for o in wrapped]
    return StateDescription(
        _UPDATES if scales_by_learning_rate else _GRADIENTS,
        fragments,
        num_variables,
        [(len(s), zlib.crc32(str(s).encode())) for s in shapes],
    )


def check_compatible(
    saved: StateDescription, current: StateDescription, class_name: str
) -> None:
    """Raise `ValueError` if a saved state does not fit an optimizer of `class_name`."""
    if saved.units != current.units:
        names = {_UPDATES: "updates", _GRADIENTS: "gradients"}
        raise ValueError(
            f"The residual was saved in units of {names[saved.units]}, and this "
            f"optimizer has it in units of {names[current.units]}: one of them "
            "includes the learning rate. Load with the settings it was saved with: "
            "`Corrections(scale_before_accumulation=...)`, or else compressor, "
            "sparsity and inner optimizer. "
            f"{_WITHOUT_STATE}"
        )
    if saved.fragments != current.fragments:
        raise ValueError(
            f"The saved {class_name} has `fragments={saved.fragments}`, and this one "
            f"has `fragments={current.fragments}`, so the deltas in progress would be "
            "assigned to another fragment. Load with the settings it was saved with. "
            f"{_WITHOUT_STATE}"
        )
    both_built = saved.num_variables and current.num_variables
    if both_built and saved.num_variables != current.num_variables:
        raise ValueError(
            _other_variables(class_name, saved.num_variables, current.num_variables)
        )
    for saved_inner, current_inner in zip(saved.wrapped, current.wrapped, strict=True):
        before, now = saved_inner[0], current_inner[0]
        is_built = before and now and max(before, now) > _BASE_VARIABLES
        if is_built and saved_inner != current_inner:
            raise ValueError(
                f"The optimizer within the saved {class_name} has {before} variables, "
                f"and the one within this has {now}"
                f"{'' if before != now else ' of other shapes'}. "
                "Load with the settings it was saved with: its kind, `use_ema`, "
                "`momentum`, `amsgrad` and the like, and whether its learning rate is "
                f"a schedule, decide which variables there are. {_WITHOUT_STATE}"
            )


def _other_variables(class_name: str, saved: int, current: int) -> str:
    return (
        f"The saved {class_name} has {saved} variables, this one has {current}. Load "
        "with the settings it was saved with: compressor, error feedback, sparsity "
        "above 0, momentum and Adam correction, what is tracked, the inner "
        "optimizer's `momentum` and `gradient_accumulation_steps`, and which layers "
        "were trainable when it was built decide which variables there are. "
        f"{_WITHOUT_STATE}"
    )


def mark_store(store: Any, description: StateDescription) -> None:
    """Write the description into a Keras store, which marks it as this package's."""
    store[_MARK] = np.array(description.to_numbers(), np.int64)


def saved_names(store: Any) -> list[str]:
    """Return the keys of the saved variables, sorted."""
    return sorted(set(store.keys()) - {_MARK})


def saved_checksum(store: Any, name: str) -> int:
    """Return the CRC-32 of a saved value of any dtype."""
    values = np.ascontiguousarray(_read_saved(store, name)).reshape(-1)
    return zlib.crc32(values.view(np.uint8).data)


def _read_saved(store: Any, name: str) -> np.ndarray[Any, Any]:
    """Return a saved value, which older Keras leaves in the file."""
    return np.asarray(store[name])


def _warn_not_loaded(reason: str) -> None:
    warnings.warn(f"The optimizer's saved state is not loaded: {reason}.", stacklevel=4)
