"""What Keras asks of an optimizer that wraps another one."""

import itertools
import warnings
import zlib
from collections.abc import Callable, Sequence, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import (
    keras_optimizers,
    keras_trainer,
    optimizer_copies,
    save_hooks,
)
from tf_dgc.multiworker import consensus, keras_saving, worker_parts
from tf_dgc.multiworker.worker_variables import (
    SAME_CHECKPOINT,
    PerWorkerVariable,
    ReplicaCopies,
)
from tf_dgc.optimizers import inner_hyperparameters
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters, Serialize

# --- Loading: whether what was saved is an optimizer's state, and all of it.

_MARK = "tf_dgc"  # a key beside those of the variables, "0", "1", ...
_OF_GRADIENTS, _OF_UPDATES = 1, 2  # what it says of the units of what waits
_COMMON = 2  # variables that every optimizer may have: iterations and learning rate
_WITHOUT = (
    "Without the state: `load_model(path, compile=False)`, or `load_weights(path, "
    "skip_mismatch=True)`."
)


def describe_state(
    scales_by_learning_rate: bool,
    turns: int,
    own: int,
    optimizers: Sequence[keras.optimizers.Optimizer],
) -> list[int]:
    """Return what is saved beside a state, so that none of another form is loaded.

    Args:
        scales_by_learning_rate: whether what waits has the learning rate in it.
        turns: number of parts of the model that take turns.
        own: number of the optimizer's own variables; 0 if it is not built.
        optimizers: optimizers that Keras saves beside it.

    Returns:
        A number that stands for the units of what waits; the two others; and of each
        optimizer beside it the number of its variables, 0 if it is not built, and a
        CRC-32 of their shapes.
    """
    shapes = [[tuple(v.shape) for v in o.variables if o.built] for o in optimizers]
    forms = [(len(some), zlib.crc32(str(some).encode())) for some in shapes]
    units = _OF_UPDATES if scales_by_learning_rate else _OF_GRADIENTS
    return [units, turns, own, *itertools.chain(*forms)]


def mark_store(store: Any, description: Sequence[int]) -> None:
    """Say in a store of Keras's that an optimizer of this package filled it.

    Args:
        store: store of what is saved.
        description: numbers that `describe` returned.
    """
    store[_MARK] = np.array(description, np.int64)


def is_marked_store(store: Any) -> bool:
    """Whether an optimizer of this package filled a store."""
    return _MARK in set(store.keys())


def saved_description(store: Any) -> list[int]:
    """Return the numbers that a store of this package's was marked by."""
    return list(map(int, read_saved(store, _MARK)))


def check_compatible(saved: Sequence[int], own: Sequence[int], kind: str) -> None:
    """Raise `ValueError` if a state of this form would not be loaded, or not whole.

    Args:
        saved: numbers of `describe` that were saved.
        own: those of the optimizer that is to load it.
        kind: name of the optimizer's class.
    """
    if saved[0] != own[0]:
        names = {_OF_UPDATES: "updates", _OF_GRADIENTS: "gradients"}
        raise ValueError(
            f"What waits was saved in units of {names[saved[0]]}, and this optimizer "
            f"keeps it in units of {names[own[0]]}: one of them has the learning rate "
            "in it. Load with the settings it was saved with: `rate_correction`, or "
            f"else compressor, sparsity and inner optimizer. {_WITHOUT}"
        )
    if saved[1] != own[1]:
        raise ValueError(
            f"The saved {kind} has `parts={saved[1]}` of the model that take turns, "
            f"and this one has `parts={own[1]}`, so what is under way would be taken "
            "for that of another part. Load with the settings it was saved with. "
            f"{_WITHOUT}"
        )
    if saved[2] and own[2] and saved[2] != own[2]:
        raise ValueError(_of_others(kind, saved[2], own[2]))
    pairs = zip(_forms(saved), _forms(own), strict=True)
    for (was, its_shapes), (now, own_shapes) in pairs:
        other = was != now or its_shapes != own_shapes
        if was and now and other and max(was, now) > _COMMON:
            raise ValueError(
                f"The optimizer within the saved {kind} has {was} variables, and the "
                f"one within this has {now}{'' if was != now else ' of other shapes'}. "
                "Load with the settings it was saved with: its kind, `use_ema`, "
                "`momentum`, `amsgrad` and the like, and whether its learning rate is "
                f"a schedule, decide which variables there are. {_WITHOUT}"
            )


def _forms(description: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(description[3::2], description[4::2], strict=True))


def saved_names(store: Any) -> list[str]:
    """Return the keys of what was saved of variables, sorted."""
    return sorted(set(store.keys()) - {_MARK})


def read_saved(store: Any, name: str) -> np.ndarray:
    """Return a value that was saved, which older Keras leaves in the file."""
    return np.asarray(store[name])


def saved_checksum(store: Any, name: str) -> int:
    """Return the CRC-32 of a value that was saved, of whatever dtype."""
    values = np.ascontiguousarray(read_saved(store, name)).reshape(-1)
    return zlib.crc32(values.view(np.uint8).data)


def is_unbuilt_state(store: Any) -> bool:
    """Whether all that was saved are the iterations, of which there were none."""
    return saved_names(store) == ["0"] and np.array_equal(read_saved(store, "0"), 0)


def should_load(
    kind: str, built: bool, trains: bool, steps: int, store: Any, own: int
) -> bool:
    """Whether there is something to load; nothing that counts is left out silently.

    Args:
        kind: name of the optimizer's class.
        built: whether it is built.
        trains: whether it was given variables, if it was built at all.
        steps: number of steps that it has taken.
        store: store of what was saved.
        own: number of the optimizer's variables.

    Raises:
        ValueError: if what this package saved would be lost, or is another state.
    """
    if is_unbuilt_state(store):
        if steps:
            _warn_of("it was saved before any step, and this one's is kept")
        return False
    saved = len(saved_names(store))
    if not is_marked_store(store):
        why = "it is of one that is not of this package" if saved else "there is none"
        _warn_of(f"{why}, and {kind} stays as it is")
        return False
    if not trains:
        _warn_of("the model has no trainable variables")
        return False
    if saved == own:
        return True
    if not built:
        raise ValueError(
            f"This {kind} is not yet built, so what is saved of its state would be "
            "lost. Before loading, `with strategy.scope(): "
            "model.optimizer.build(model.trainable_variables)`; or load without the "
            "state, by `load_weights(path, skip_mismatch=True)` or before `compile`."
        )
    raise ValueError(_of_others(kind, saved, own))


def _of_others(kind: str, saved: int, own: int) -> str:
    return (
        f"The saved {kind} has {saved} variables, this one has {own}. Load with the "
        "settings it was saved with: compressor, error feedback, sparsity above 0, "
        "momentum and Adam correction, what is tracked, the inner optimizer's "
        "`momentum` and `gradient_accumulation_steps`, and which layers were trainable "
        f"when it was built decide which variables there are. {_WITHOUT}"
    )


def _warn_of(why: str) -> None:
    warnings.warn(
        f"What is saved of the optimizer's state is not loaded: {why}.", stacklevel=4
    )


class OptimizerWrapper(save_hooks.CheckpointHooks):
    """A `keras.optimizers.Optimizer` whose update is applied by an inner one.

    Learning rate, iterations and all settings that Keras optimizers have in common
    belong to the inner optimizer, or were taken over from it; the wrapper shows them as
    its own. Setting one acts, as in Keras, on steps that are traced from then on: do it
    before `fit`, or compile the model again.

    Args:
        inner_optimizer: optimizer that applies the update to gradients that are already
            summed over the workers. It is changed not to sum them again.
        hyperparameters: the settings of the inner optimizer that are applied in its
            place.
        name: name of the optimizer.
        strategy: strategy under which the optimizer was created, prepared.
    """

    saved_by_all_workers = True  # each has a part
    own_backup = ""  # name of the backup of who backs up without the other workers
    fixed: Set[str] = frozenset()  # names of attributes that are set once
    steps_locally = False  # whether a step of the inner optimizer meets nobody

    weight_decay = inner_hyperparameters.delegated_setting("weight_decay")
    clipnorm = inner_hyperparameters.delegated_setting("clipnorm")
    global_clipnorm = inner_hyperparameters.delegated_setting("global_clipnorm")
    clipvalue = inner_hyperparameters.delegated_setting("clipvalue")
    use_ema = inner_hyperparameters.delegated_setting("use_ema")
    ema_momentum = inner_hyperparameters.delegated_setting("ema_momentum")
    ema_overwrite_frequency = inner_hyperparameters.delegated_setting(
        "ema_overwrite_frequency"
    )
    loss_scale_factor = inner_hyperparameters.delegated_setting("loss_scale_factor")
    gradient_accumulation_steps = inner_hyperparameters.delegated_setting(
        "gradient_accumulation_steps"
    )

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        hyperparameters: InnerHyperparameters,
        name: str,
        strategy: tf.distribute.Strategy,
    ):
        super().__init__(learning_rate=lambda: inner_optimizer.learning_rate, name=name)
        keras_optimizers.make_scalars_readable(inner_optimizer)
        keras_optimizers.share_iterations(self, inner_optimizer)
        keras_optimizers.replace_all_reduce(inner_optimizer, list)
        self._hyperparameters = hyperparameters
        self._strategy = strategy
        self._trains_nothing = False
        self._is_loaded = True  # what a file has for it, and so for the inner one
        keras_optimizers.load_only_if(inner_optimizer, lambda: self._is_loaded)
        self._form = save_hooks.SavedNote(self._describe, self._check_form)
        self.inner_optimizer = inner_optimizer

    def read_setting(self, name: str) -> Any:
        """Return one of `settings.NAMES`, as the user gave or set it."""
        if name in self._hyperparameters.taken:
            return self._hyperparameters.taken[name]
        return getattr(self.inner_optimizer, name)

    def change_setting(self, name: str, value: Any) -> None:
        """Set one of `settings.NAMES`.

        Raises:
            ValueError: for a value that is refused when an optimizer is made, and for
                `use_ema` and accumulation of an optimizer that is built.
        """
        inner_hyperparameters.check_setting_change(
            self, name, value, self.steps_locally
        )
        if name in self._hyperparameters.taken:
            self._hyperparameters.taken[name] = value
        else:
            setattr(self.inner_optimizer, name, value)

    @property
    def differing_variables(self) -> list[keras.Variable]:
        """Variables that differ by worker, of the model too, of stock kinds."""
        return []

    @property
    def variables(self) -> list[keras.Variable]:
        """The optimizer's variables, those of the inner optimizer included.

        None while a part of a backup is written or read: `LossScaleOptimizer` would
        add up those of all workers, beside what this optimizer saves itself.
        """
        if worker_parts.part_being_written() or worker_parts.part_being_read():
            return []
        own = keras_optimizers.own_variables(self)
        known = {id(v) for v in own}
        return own + [v for v in self.inner_optimizer.variables if id(v) not in known]

    @property
    def iterations(self) -> Any:
        """Steps of the inner optimizer; where it accumulates, Keras's quotient."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate, which belongs to the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def _model_variables_moving_average(self) -> Any:
        # `SwapEMAWeights` looks no deeper than the optimizer within a loss scale.
        return self.inner_optimizer._model_variables_moving_average

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """See `keras.optimizers.Optimizer.exclude_from_weight_decay`."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        inner_hyperparameters.check_attribute(self, name, value, self.fixed)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        own = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return inner_hyperparameters.describe_constructor(
            type(self), own, *self._wrapped()
        )

    def _wrapped(self) -> list[str]:
        """Return what the wrapped optimizers are, as they are to be shown."""
        inner = keras_optimizers.arguments_of(self.inner_optimizer)
        inner.update(self._hyperparameters.taken)
        return [
            inner_hyperparameters.describe_constructor(
                type(self.inner_optimizer), inner
            )
        ]

    def check_copies(self) -> None:
        """Raise `ValueError` if a function would read the optimizer that was copied.

        Call it before the first step: by now a name may stand for this optimizer.
        """
        for optimizer in self.wrapped_optimizers:
            for reference in optimizer_copies.name_references(optimizer):
                inner_hyperparameters.check_reference(self, reference)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let the inner optimizer set final values (moving averages)."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Set all of `variables`; call it on every worker.

        Args:
            weights: one value for each, for example `[v.numpy() for v in variables]`.
                Of state that differs between workers it is the sum, of which every
                worker gets an equal share.

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

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Return what makes a copy: of the settings, as in Keras not of the state."""
        if self.built:
            warnings.warn(
                f"A copy of this {type(self).__name__} has its settings, and begins "
                "without its state.",
                stacklevel=2,
            )
        made_of = keras.saving.serialize_keras_object(self)
        return keras.saving.deserialize_keras_object, (made_of,)

    # --- saving ---------------------------------------------------------------------

    def in_checkpoint(self) -> None:
        """Let a checkpoint be complete on all workers when it is on one."""
        keras_saving.finish_checkpoint_together(self._strategy)

    def save_own_variables(self, store: Any) -> None:
        """Save the state of all workers; call it on every worker.

        In a backup, this worker's own goes to its part, and nobody else is asked. Keras
        saves the inner optimizer beside it.

        Raises:
            ValueError: on all workers, if two of them write to the same file.
            RuntimeError: if a worker does not come within `TF_DGC_TIMEOUT` seconds.
        """
        part = worker_parts.part_being_written()
        if part is None:
            keras_saving.finish_save_together(self._strategy)
        mark_store(store, self._describe())
        for i, variable in enumerate(self._saved_variables()):
            if not isinstance(variable, PerWorkerVariable | ReplicaCopies):
                store[str(i)] = variable.numpy()
            elif part is None:
                store[str(i)] = variable.gather()
            else:
                store[str(i)] = part.put(variable.gather(local=True))

    @property
    def wrapped_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Optimizers that Keras saves beside this one."""
        return [self.inner_optimizer]

    def _describe(self) -> list[int]:
        own = len(keras_optimizers.own_variables(self)) if self.built else 0
        about = self._hyperparameters.rate, getattr(self, "parts", 1), own
        return describe_state(*about, self.wrapped_optimizers)

    def _check_form(self, saved: list[int]) -> None:
        check_compatible(saved, self._describe(), type(self).__name__)

    def _saved_variables(self) -> list[Any]:
        """Return the optimizer's own variables, and the copies of what differs."""
        differing = self.differing_variables
        apart = {id(v) for v in differing}
        own = keras_optimizers.own_variables(self)
        same = (v for v in own if id(v) not in apart)
        return [*same, *map(self._copies_of, differing)]

    def _copies_of(self, variable: keras.Variable) -> ReplicaCopies:
        return ReplicaCopies(self._strategy, variable.value)

    def load_own_variables(self, store: Any) -> None:
        """Load the state; call it on every worker, with the same file or a copy of it.

        Another number of workers than saved it divides it: see `elastic.share`. The
        state of another package's optimizer is left out, with a warning, as by Keras,
        and so is one that was saved before any step where this one has taken some.

        Raises:
            ValueError: if it was saved with other settings (for example without
                momentum correction, with what waits in other units, or with
                `use_ema` of the inner optimizer), or this optimizer is not yet built,
                because what was not sent would be lost; and on all workers, if they
                load different files.
            RuntimeError: if a worker does not come within `TF_DGC_TIMEOUT` seconds.
        """
        self._is_loaded = False
        own = self._saved_variables()
        about = type(self).__name__, self.built, not self._trains_nothing
        steps = int(self.iterations)
        if not should_load(*about, steps, store, len(own)):
            return
        self._check_form(saved_description(store))
        self._is_loaded = True
        part = worker_parts.part_being_read()
        for i, variable in enumerate(own):
            values = read_saved(store, str(i))
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
            return  # all know that it is the same backup
        checksums = (saved_checksum(store, name) for name in saved_names(store))
        consensus.require_equal(
            self._strategy,
            lambda: {"checksum of the saved state": list(checksums)},
            SAME_CHECKPOINT,
        )

    def is_loaded_without(self, variables: Sequence[keras.Variable]) -> bool:
        """Whether Keras makes this of a file, for a model of which nothing is trained.

        Then it is not built, and what was saved of its state is not loaded.
        """
        self._trains_nothing = not variables and keras_trainer.is_made_of_a_config()
        return self._trains_nothing

    def build_without_variables(self) -> None:
        """Build the optimizer for a model of which all is frozen, as Keras does."""
        for optimizer in self.wrapped_optimizers:
            optimizer.build([])
        keras_optimizers.remember_variables(self, [])

    def restore_copies(self, copies: ReplicaCopies, values: np.ndarray) -> None:
        """Restore what each worker has of one of `differing_variables`.

        Args:
            copies: copies of it.
            values: values of all workers that saved, `[N, ...]`.
        """
        copies.scatter(values, "mean")

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the current learning rate.

        Raises:
            NotImplementedError, TypeError: as Keras, for a learning-rate schedule or
                another object that has no config.
        """
        return self.collect_config(keras.saving.serialize_keras_object)

    def describe_config(self) -> dict[str, Any]:
        """Return `get_config`, in which what has no config is described instead."""
        return self.collect_config(inner_hyperparameters.describe)

    def collect_config(self, serialize: Serialize) -> dict[str, Any]:
        """Return the constructor's arguments.

        Args:
            serialize: function that turns an argument into JSON values.
        """
        raise NotImplementedError

    def unwrap(self) -> keras.optimizers.Optimizer:
        """Return an optimizer like the one that the user passed as `inner`, unbuilt.

        Of a wrapper that is built it is made of the config.
        """
        if self.built:
            return keras.optimizers.get(self.get_config()["inner"])
        again = optimizer_copies.copy_optimizer(self.inner_optimizer)
        for name, value in self._hyperparameters.taken.items():
            setattr(again, name, value)
        return again

    def inner_config(self, serialize: Serialize) -> dict[str, Any]:
        """Return the config of what the user passed as `inner`.

        Args:
            serialize: function as of `collect_config`.
        """
        inner = serialize(self.inner_optimizer)
        stated = inner["config"].keys()
        inner["config"].update(
            {
                name: value
                for name, value in self._hyperparameters.taken.items()
                if name in stated
            }
        )
        return inner
