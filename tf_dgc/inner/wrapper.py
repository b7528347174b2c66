"""What Keras asks of an optimizer that wraps another one."""

import warnings
from collections.abc import Callable, Sequence, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import (
    checkpoints,
    keras_files,
    keras_optimizers,
    optimizer_copies,
    trainer,
)
from tf_dgc.checkpoint import keras_saving, parts
from tf_dgc.cluster import meeting
from tf_dgc.distribute.copies import Copies
from tf_dgc.distribute.worker_variables import SAME_CHECKPOINT, PerWorkerVariable
from tf_dgc.inner import descriptions, loading, settings
from tf_dgc.inner.descriptions import Serialize
from tf_dgc.inner.taken import TakeOver


class OptimizerWrapper(checkpoints.CheckpointSeam):
    """A `keras.optimizers.Optimizer` whose update is applied by an inner one.

    Learning rate, iterations and all settings that Keras optimizers have in common
    belong to the inner optimizer, or were taken over from it; the wrapper shows them as
    its own. Setting one acts, as in Keras, on steps that are traced from then on: do it
    before `fit`, or compile the model again.

    Args:
        inner_optimizer: optimizer that applies the update to gradients that are already
            summed over the workers. It is changed not to sum them again.
        took: the settings of the inner optimizer that are applied in its place.
        name: name of the optimizer.
        strategy: strategy under which the optimizer was created, prepared.
    """

    saved_by_all_workers = True  # each has a part
    own_backup = ""  # name of the backup of who backs up without the other workers
    fixed: Set[str] = frozenset()  # names of attributes that are set once
    steps_alone = False  # whether a step of the inner optimizer meets nobody

    weight_decay = settings.shared("weight_decay")
    clipnorm = settings.shared("clipnorm")
    global_clipnorm = settings.shared("global_clipnorm")
    clipvalue = settings.shared("clipvalue")
    use_ema = settings.shared("use_ema")
    ema_momentum = settings.shared("ema_momentum")
    ema_overwrite_frequency = settings.shared("ema_overwrite_frequency")
    loss_scale_factor = settings.shared("loss_scale_factor")
    gradient_accumulation_steps = settings.shared("gradient_accumulation_steps")

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        took: TakeOver,
        name: str,
        strategy: tf.distribute.Strategy,
    ):
        super().__init__(learning_rate=lambda: inner_optimizer.learning_rate, name=name)
        keras_optimizers.make_scalars_readable(inner_optimizer)
        keras_optimizers.share_iterations(self, inner_optimizer)
        keras_optimizers.replace_all_reduce(inner_optimizer, list)
        self._took = took
        self._strategy = strategy
        self._trains_nothing = False
        self._is_loaded = True  # what a file has for it, and so for the inner one
        keras_files.load_only_if(inner_optimizer, lambda: self._is_loaded)
        self._form = checkpoints.Remark(self._describe, self._check_form)
        self.inner_optimizer = inner_optimizer

    def read_setting(self, name: str) -> Any:
        """Return one of `settings.NAMES`, as the user gave or set it."""
        if name in self._took.taken:
            return self._took.taken[name]
        return getattr(self.inner_optimizer, name)

    def change_setting(self, name: str, value: Any) -> None:
        """Set one of `settings.NAMES`.

        Raises:
            ValueError: for a value that is refused when an optimizer is made, and for
                `use_ema` and accumulation of an optimizer that is built.
        """
        settings.check_change(self, name, value, self.steps_alone)
        if name in self._took.taken:
            self._took.taken[name] = value
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
        if parts.being_written() or parts.being_read():
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
        settings.check_attribute(self, name, value, self.fixed)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        own = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return settings.describe(type(self), own, *self._wrapped())

    def _wrapped(self) -> list[str]:
        """Return what the wrapped optimizers are, as they are to be shown."""
        inner = keras_optimizers.arguments_of(self.inner_optimizer)
        inner.update(self._took.taken)
        return [settings.describe(type(self.inner_optimizer), inner)]

    def check_copies(self) -> None:
        """Raise `ValueError` if a function would read the optimizer that was copied.

        Call it before the first step: by now a name may stand for this optimizer.
        """
        for optimizer in self.wrapped_optimizers:
            for reference in optimizer_copies.name_references(optimizer):
                settings.check_reference(self, reference)

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
        keras_saving.end_checkpoint_together(self._strategy)

    def save_own_variables(self, store: Any) -> None:
        """Save the state of all workers; call it on every worker.

        In a backup, this worker's own goes to its part, and nobody else is asked. Keras
        saves the inner optimizer beside it.

        Raises:
            ValueError: on all workers, if two of them write to the same file.
            RuntimeError: if a worker does not come within `TF_DGC_TIMEOUT` seconds.
        """
        part = parts.being_written()
        if part is None:
            keras_saving.end_together(self._strategy)
        loading.mark(store, self._describe())
        for i, variable in enumerate(self._saved_variables()):
            if not isinstance(variable, PerWorkerVariable | Copies):
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
        about = self._took.rate, getattr(self, "parts", 1), own
        return loading.describe(*about, self.wrapped_optimizers)

    def _check_form(self, saved: list[int]) -> None:
        loading.check(saved, self._describe(), type(self).__name__)

    def _saved_variables(self) -> list[Any]:
        """Return the optimizer's own variables, and the copies of what differs."""
        differing = self.differing_variables
        apart = {id(v) for v in differing}
        own = keras_optimizers.own_variables(self)
        same = (v for v in own if id(v) not in apart)
        return [*same, *map(self._copies_of, differing)]

    def _copies_of(self, variable: keras.Variable) -> Copies:
        return Copies(self._strategy, variable.value)

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
        if not loading.is_to_be_loaded(*about, steps, store, len(own)):
            return
        self._check_form(loading.saved_description(store))
        self._is_loaded = True
        part = parts.being_read()
        for i, variable in enumerate(own):
            values = loading.read(store, str(i))
            if part is not None and isinstance(variable, PerWorkerVariable | Copies):
                values = part.take(values)
            if isinstance(variable, Copies):
                self.restore_copies(variable, values)
            elif isinstance(variable, PerWorkerVariable):
                variable.scatter(values)
            else:
                variable.assign(values)
        if part is not None:
            return  # all know that it is the same backup
        checksums = (loading.checksum(store, name) for name in loading.names(store))
        meeting.agree(
            self._strategy,
            lambda: {"checksum of the saved state": list(checksums)},
            SAME_CHECKPOINT,
        )

    def is_loaded_without(self, variables: Sequence[keras.Variable]) -> bool:
        """Whether Keras makes this of a file, for a model of which nothing is trained.

        Then it is not built, and what was saved of its state is not loaded.
        """
        self._trains_nothing = not variables and trainer.is_made_of_a_config()
        return self._trains_nothing

    def build_without_variables(self) -> None:
        """Build the optimizer for a model of which all is frozen, as Keras does."""
        for optimizer in self.wrapped_optimizers:
            optimizer.build([])
        keras_optimizers.remember_variables(self, [])

    def restore_copies(self, copies: Copies, values: np.ndarray) -> None:
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
        return self.collect_config(descriptions.describe)

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
        for name, value in self._took.taken.items():
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
            {name: value for name, value in self._took.taken.items() if name in stated}
        )
        return inner
