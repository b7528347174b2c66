"""The interface of a compression method.

A method sees one tensor of one worker: `Compressor.exchange` is a generator that asks
for collectives (`yield Sum(values)`, `yield Gather(words)`) and returns a `Result`. It
knows nothing of ranks, of strategies or of Keras variables. Whoever runs it packs the
requests of all tensors of a round into one collective (`collectives/packing.py`), and
owns the state.

A method of one round, whose payloads are gathered and summed, is a `OneRound`
(`one_round.py`), which asks for less.
"""

import abc
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc.arguments import show
from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.random_keys import RandomKeys


class StateSpec(NamedTuple):
    """One named state that a method needs for a tensor.

    Attributes:
        shape: shape of the state, on one worker.
        per_worker: whether it differs between workers, as `residual` does. Such state
            is zero at first. Other state must be computed alike on all workers, from
            what they have in common.
        initial: function of a NumPy generator of fixed seed that returns the first
            value; None for zeros.
        elastic: rule for what another number of workers, that goes on from a
            checkpoint, gets of state that differs between workers: "sum", the total in
            equal shares; "mean"; "largest", entry by entry; or "zero". Gradients are
            divided by the number of workers, so what is of their size is "sum".
    """

    shape: tuple[int, ...]
    per_worker: bool = True
    initial: Callable[[np.random.Generator], np.ndarray] | None = None
    elastic: str = "sum"


class NativeMethod(NamedTuple):
    """What the native engine is to do of a tensor (`custom_ops/methods/`).

    Attributes:
        name: name of the native method.
        parameters: numbers that it takes, in its order; they become float32.
        states: names of the states of the tensor's size that it updates, in its order.
        summed_as: dtype in which its values are summed on the way; None if words are
            gathered.
        num_summed: number of those that are summed; None for all entries.
        shared: names of the states that all workers have alike, of the tensor's size,
            that it updates when it decodes, in its order.
        first: name of the native method of a round before that one, with the same
            parameters, whose words are gathered; None if there is one round.
        first_summed: number of those that are summed in that round instead, of which
            the method is told the sum.
        num_words: number of words that it sends in that round.
        num_notes: number of those that it leaves for the same worker's second round;
            where rounds are sums, that the second one leaves for its decoder.
        all_workers_native: whether all workers must have it, as its sums have other
            bits than those of `exchange`.
        bounded: whether it takes, as one more parameter, what may be sent of an entry.
        needs_term_bound: whether it takes, as one more parameter, what each worker may
            send of an entry that is summed as `summed_as` (`value_types.largest_term`).
    """

    name: str
    parameters: Sequence[float] = ()
    states: Sequence[str] = ()
    summed_as: tf.DType | None = None
    num_summed: int | None = None
    shared: Sequence[str] = ()
    first: str | None = None
    first_summed: int = 0
    num_words: int = 0
    num_notes: int = 0
    all_workers_native: bool = False
    bounded: bool = False
    needs_term_bound: bool = False

    @staticmethod
    def in_halves(number: int) -> list[float]:
        """Return a number of entries as two parameters, which are exact as float32."""
        return [number >> 16, number & 0xFFFF]


KINDS = (
    "sparsification",
    "quantization",
    "difference",
    "low rank",
    "learned",
    "control",
)
AGGREGATIONS = ("gather", "sum", "vote")
FEEDBACK_RULES = ("required", "default", "optional", "forbidden")


class Compressor(abc.ABC):
    """A compression method.

    A subclass states the facts below, implements `bytes`, `exchange` and `get_config`,
    and is made loadable with `keras.saving.register_keras_serializable`.

    Attributes:
        name: name by which `tf_dgc.compressors.get` finds it; letters, digits and "_".
        kind: kind of method, one of `KINDS`.
        reference: paper of the method: authors, venue and year.
        aggregation: way in which payloads of the first round meet: "gather" (and
            decoded and summed by everyone), "sum" (by an all-reduce on the way) or
            "vote" (gathered, and the majority counts).
        unbiased: whether the expectation of what is sent, over the draw, is the input.
        error_feedback: whether what is not sent is kept in `residual`: "required",
            "default" (unless switched off), "optional" (if switched on) or "forbidden".
        feedback_decay: share of what was kept back that is added to the next gradient,
            in (0, 1]; below 1 it forgets, and does not conserve.
        needs_others: whether what a worker sends depends on what others do in the same
            step, so that it cannot be decoded by itself.
        is_momentum: whether what is kept back is itself the momentum, so that the
            optimizer that applies the sum must have none.
        has_units: whether it compares with a number in units of gradients, or returns
            something that is none, so that gradients must not have the learning rate in
            them.
        sends_signs: whether what arrives is of 1 and -1, whatever magnitudes were.
        additive: whether `Result.sum` is the sum of what the workers sent; not so for
            votes, and where only the sum can be decoded.
        conserves: whether, with error feedback, what has arrived and what is kept back
            add up to all there was; not so where decoding loses what no one can know.
        lossless: whether everything is sent exactly.
        rounding: unit roundoff of sums that are formed in a narrow type on the way; 0
            if they are formed in the type of the values.
        reads_residual: whether `exchange` finds, as `state["residual"]`, what had been
            kept back before this step (zeros without error feedback), so that the
            gradient alone is `values - state["residual"]`.
        respects_largest: whether `exchange` itself sends no more than `draw.largest` of
            an entry. To others, no more is given.
        together: whether `exchange` and `bytes` are about all tensors of a step at once
            that are not exempt, of one dtype, end to end as one of shape `[n]`, whose
            sizes `draw.sizes` has; else about each by itself. `state` is about each,
            and `exchange` gets and returns all of it end to end, and `common_state` as
            it is.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    reference: ClassVar[str]
    aggregation: ClassVar[str] = "gather"
    lossless: ClassVar[bool] = False
    rounding: ClassVar[float] = 0.0
    reads_residual: ClassVar[bool] = False
    respects_largest: ClassVar[bool] = False
    together: ClassVar[bool] = False
    is_momentum: ClassVar[bool] = False
    needs_others: ClassVar[bool] = False
    additive: bool = True
    conserves: bool = True
    has_units: bool = False
    sends_signs: bool = False
    unbiased: bool = False
    error_feedback: str = "default"
    feedback_decay: float = 1.0

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return what is to be remembered between steps of a tensor of this shape."""
        del shape
        return {}

    def common_state(self) -> dict[str, StateSpec]:
        """Return what `together` methods are to remember of all tensors at once."""
        return {}

    @property
    def wait(self) -> float:
        """Steps that an entry waits for on average until it is sent.

        Of a schedule, by what it comes to; 0 for what sends something of all entries.
        """
        sparsity = schedules.final_sparsity(getattr(self, "sparsity", 0.0))
        return sparsity / (1.0 - sparsity)

    @abc.abstractmethod
    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int | None:
        """Return what one worker hands to the collectives per step, in all rounds.

        Args:
            shape: shape of the tensor.
            dtype: type of the accumulators, float32 or float64.

        Returns:
            A number of bytes; None if it is known only at run time.
        """

    @abc.abstractmethod
    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Send what goes out of one tensor, and return what all workers sent.

        Args:
            values: gradient, finite, of the tensor's shape, float32 or float64; with
                error feedback times the learning rate, behind an SGD unless the method
                `has_units`, and with what was kept back before.
            state: tensors by name, as `state` and `common_state` say.
            keys: seeds for this tensor in this step.

        Yields:
            `Sum` or `Gather`; the same kinds and sizes on all workers.

        Returns:
            A `Result`.
        """

    def native(self, shape: tuple[int, ...]) -> NativeMethod | None:
        """Return how the native engine does the same; None if it cannot.

        Bit for bit, unless it is `Native.by_all`.

        Classes that derive from a native method are asked only if they define it too.

        Args:
            shape: shape of the tensor, of float32.
        """
        del shape
        return None

    def error_bound(self, size: int) -> float | None:
        """Return b with `E|sent - values|^2 <= b |values|^2`; None if there is none.

        Args:
            size: number of entries of the tensor.
        """
        del size
        return None

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Compressor":
        """Build a compressor from `get_config`'s dictionary."""
        return cls(**config)

    def __repr__(self) -> str:
        try:
            values = self.get_config()
        except Exception:  # of a schedule that has no config, which Keras trains with
            names = inspect.signature(type(self)).parameters
            values = {n: getattr(self, n) for n in names if hasattr(self, n)}
        settings = ", ".join(f"{k}={show(v)}" for k, v in values.items())
        return f"{type(self).__name__}({settings})"
