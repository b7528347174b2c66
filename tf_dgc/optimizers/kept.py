"""What an optimizer keeps between steps, made before the first one."""

import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import exchanges
from tf_dgc._internals import keras_optimizers
from tf_dgc.adaptive import adam
from tf_dgc.adaptive.agreement import make_agreement
from tf_dgc.cluster import meeting
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import NoCompression
from tf_dgc.exchanges import Exchange
from tf_dgc.inner.taken import TakeOver
from tf_dgc.inner.updating import have_operations
from tf_dgc.optimizers import bucketing, overwriting, tensors, validation
from tf_dgc.optimizers.accumulating import Accumulation
from tf_dgc.optimizers.choosing import Chosen, choose
from tf_dgc.optimizers.exclusions import Exclusions
from tf_dgc.steps.memory import Memory, make_memory


# Not a tuple: Keras saves those that are attributes of an optimizer, and looks inside.
@dataclasses.dataclass(frozen=True)
class Kept:
    """Variables, and what is known of them.

    Attributes:
        tensors: descriptions of the tensors of the model.
        memory: variables of these; behind them those of the Adam correction's sample.
        adam: correction of an inner Adam; None for others, and where it is off.
        natively: whether all workers have the native operations for the variables.
        chosen: method and exchange of the steps.
        accumulation: gradients of calls that make no step yet; None if each makes one.
    """

    tensors: list[Tensor]
    memory: Memory
    adam: adam.AdamCorrection | None
    natively: bool
    chosen: Chosen
    accumulation: Accumulation | None = None

    @property
    def remembers(self) -> bool:
        """Whether a step depends on the gradients of earlier calls."""
        return self.accumulation is not None or not self.memory.is_empty

    @property
    def of_calls(self) -> list[keras.Variable]:
        """Variables of the gradients of several calls."""
        return self.accumulation.variables if self.accumulation else []

    @property
    def of_adam(self) -> list[keras.Variable]:
        """Variables of the correction that belong to no tensor of the model."""
        return list(self.adam.variables) if self.adam else []

    @property
    def of_method(self) -> list:
        """State of the method, of each tensor; behind them that of all at once."""
        common = [self.memory.common] if self.memory.common else []
        return self.of_model(self.memory.states) + common

    @property
    def rule(self) -> str | None:
        """Name of the inner optimizer's rule, if the correction has a hand in it."""
        return self.adam.kind.native_rule if self.adam else None

    def of_model(self, variables: Any) -> list:
        """Return those of the tensors of the model."""
        return list(variables[: len(self.tensors)])


def meet(
    optimizer: Any, variables: list[keras.Variable], strategy: tf.distribute.Strategy
) -> bool:
    """Compare with the other workers what they were given, before anything is made.

    Args:
        optimizer: optimizer, whose config and `variables` must be alike on all.
        variables: variables of the model.
        strategy: strategy of the workers.

    Returns:
        Whether all workers have the native operations for the variables.
    """
    with tf.init_scope():  # the first call may come while a step is being traced
        lane = getattr(getattr(optimizer, "background", None), "number", None)
        meeting.agree(
            strategy,
            lambda: tensors.agreement(optimizer, variables, lane),
        )
        return have_operations(strategy, variables)


def make(
    optimizer: Any,
    variables: list[keras.Variable],
    exclusions: Exclusions,
    keeps_residual: bool,
    took: TakeOver,
    natively: bool,
    strategy: tf.distribute.Strategy,
) -> Kept:
    """Create all variables; call it on every worker, in the strategy's scope.

    Args:
        optimizer: `CompressedOptimizer`, whose inner optimizer is built.
        variables: variables of the model.
        exclusions: exclusions from compression.
        keeps_residual: whether what is not sent is kept.
        took: settings of the inner optimizer that are applied in its place.
        natively: whether all workers have the native operations for the variables.
        strategy: strategy of the optimizer.
    """
    exclusions.warn_of_unmatched(variables)
    trained, _ = overwriting.split(variables, variables)
    found = [_describe(optimizer, v, exclusions, keeps_residual) for v, _ in trained]
    agreement = None
    if took.adam:
        agreement = make_agreement(found, optimizer.num_workers, optimizer.seed)
    ways, merges = validation.allows(optimizer, keeps_residual)
    merges = merges and validation.is_exact(ways, optimizer.compressor, found)
    memory = make_memory(
        [*found, *([agreement.tensor] if agreement else [])],
        # Of a method among neighbours there is a state of each of them (`known.py`).
        NoCompression() if ways.is_near else optimizer.compressor,
        keeps_residual=keeps_residual,
        keeps_velocity=took.keeps_velocity,
        keeps_second_moment=took.adam is not None,
        keeps_largest_moment=took.adam is not None and took.adam.largest,
        tracks_staleness=optimizer.track_staleness,
        # As a refresh agrees on them.
        moment_rule="largest" if took.adam and took.adam.infinity else "mean",
    )
    asked, wanted = optimizer.compressor, optimizer.overlap
    if bucketing.hindrance(asked, took, optimizer.track_staleness):
        wanted = False
    asks = asked, found, keeps_residual, merges, bool(wanted)
    chosen = choose(ways, *asks, strategy, optimizer.communicator)
    num_kept = len([some for some in (memory.residual, memory.velocity) if some])
    chosen = bucketing.split(chosen, wanted, found, num_kept, optimizer.num_workers)
    correction = None
    if took.adam:
        correction = adam.AdamCorrection(
            optimizer.inner_optimizer,
            took.adam,
            took.momentum,
            took.rate,
            memory,
            None if chosen.compressor is not asked else asked,
            agreement,
            functools.partial(keras_optimizers.variable_index, optimizer),
        )
    accumulation = None
    if took.calls > 1:
        accumulation = Accumulation(took.calls, found, variables)
        accumulation.set_rate(optimizer.inner_optimizer)
    return Kept(found, memory, correction, natively, chosen, accumulation)


def name_of(made: Kept | None, exchange: Exchange | str) -> str:
    """Return the name of an exchange, or of what was chosen by it.

    Args:
        made: variables of the optimizer; None if there are none yet.
        exchange: exchange of the optimizer, or its name.
    """
    return made.chosen.name if made else exchanges.get(exchange).name


def _describe(
    optimizer: Any,
    variable: keras.Variable,
    exclusions: Exclusions,
    keeps_residual: bool,
) -> Tensor:
    small = tensors.is_small(variable, optimizer.min_compress_size)
    exempt = small or variable in exclusions
    coded = optimizer.exempt_dtype
    return tensors.describe(
        variable, exempt, keeps_residual, optimizer.num_workers, coded
    )
