"""The interface of a compression method.

A method sees one tensor of one worker. `Compressor.aggregate` is a generator that
yields requests for collectives (`yield AllReduce(values)`, `yield AllGather(words)`)
and returns a `Result`. It does not depend on ranks, strategies or Keras variables: its
caller owns the state, and packs the requests of all tensors of a round into one
collective (`collectives/packing.py`).

`OneRound` (`common/one_round.py`) is a simpler interface for methods whose payloads are
gathered once and summed.
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
    """A named state of a method for one tensor.

    Attributes:
        shape: shape of the state, on one worker.
        per_worker: whether it differs between workers, as the residual does. Such state
            starts at zero. Other state must be computed from values that all workers
            have, so that it stays the same on all of them.
        initial: function from a NumPy generator of fixed seed to the initial value;
            None for zeros.
        rescaling: rule by which state that differs between workers is divided when
            training resumes with another number of workers: "sum", the total in equal
            shares; "mean"; "largest", entry by entry; or "zero". Gradients are divided
            by the number of workers, so state in units of gradients is "sum".
    """

    shape: tuple[int, ...]
    per_worker: bool = True
    initial: Callable[[np.random.Generator], "np.ndarray[Any, Any]"] | None = None
    rescaling: str = "sum"


class NativeMethod(NamedTuple):
    """The native engine's implementation of a method (`custom_ops/methods/`).

    Attributes:
        name: name of the native method.
        parameters: its parameters, in its order; they become float32.
        states: names of the states, of the tensor's size, that it updates when it
            encodes, in its order.
        summed_as: dtype in which its values are summed by an all-reduce; None if words
            are gathered.
        num_summed: number of values to sum; None for all entries.
        shared: names of the states, of the tensor's size and the same on all workers,
            that it updates when it decodes, in its order.
        first: name of the native method of a preceding round, with the same parameters,
            whose words are gathered; None for methods of one round.
        first_summed: number of values that the preceding round sums instead; the second
            round takes the sum as parameters.
        num_words: number of words that the preceding round sends.
        num_notes: number of values that the preceding round leaves for this worker's
            second round; if rounds are sums, that the second leaves for its decoder.
        all_workers_native: whether all workers must use the native method, as its sums
            have other bits than those of `aggregate`.
        bounded: whether it takes the upper bound of the magnitudes to send as one more
            parameter.
        needs_term_bound: whether it takes the bound of each worker's values that are
            summed as `summed_as` (`value_types.largest_term`) as one more parameter.
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
        """Return an integer as two parameters that are exact as float32."""
        return [number >> 16, number & 0xFFFF]


AGGREGATIONS = ("gather", "sum", "vote")
FEEDBACK_RULES = ("required", "default", "optional", "forbidden")


class Compressor(abc.ABC):
    """A compression method.

    Derive from `Sparsifier`, `Quantizer` or `LowRank` if the method is of this kind.
    A method sets `name` and `reference`, and each attribute below whose default is not
    true of it; it implements `bytes`, `aggregate` and `get_config`, and is registered
    with `keras.saving.register_keras_serializable`.

    Attributes:
        name: name for `tf_dgc.compressors.get`; letters, digits and "_".
        kind: kind of method, for tables.
        reference: paper of the method: authors, venue and year.
        aggregation: combination of the first round's payloads: "gather" (then each
            worker decodes and sums them), "sum" (by an all-reduce) or "vote" (gathered;
            the majority decides).
        unbiased: whether the expected value of a payload is the input.
        error_feedback: whether entries or parts of them that are not sent stay in the
            residual: "required", "default" (unless turned off), "optional" (if turned
            on) or "forbidden".
        feedback_decay: factor of the residual before it is added to the next gradient,
            in (0, 1]; below 1 the method loses part of it.
        residual_is_momentum: whether the residual is the momentum, so that the inner
            optimizer must have none.
        homogeneity: the d in "input times c gives result times c**d", for c > 0. 1 for
            most methods; 0 if the result does not depend on the scale, as signs; None
            if the method compares entries with a number in units of gradients. Unless
            it is 1, the input does not contain the learning rate.
        additive: whether `Result.sum` is the sum of the workers' `Result.sent`; not so
            for votes, and if only the sum can be decoded.
        reads_residual: whether `aggregate` reads `state["residual"]`, the residual
            before this step (zeros without error feedback). The gradient alone is
            `values - state["residual"]`.
        limits_magnitudes: whether `aggregate` limits magnitudes to `keys.max_magnitude`
            itself. Other methods receive limited input.
        entire_model: whether `aggregate` and `bytes` take all compressed tensors of a
            step at once, of one dtype, concatenated to shape `[n]`, with `keys.sizes`;
            else each by itself. `state` is per tensor, and `aggregate` receives and
            returns it concatenated; `common_state` is passed as it is.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = "other"
    reference: ClassVar[str]
    aggregation: ClassVar[str] = "gather"
    residual_is_momentum: ClassVar[bool] = False
    reads_residual: ClassVar[bool] = False
    limits_magnitudes: ClassVar[bool] = False
    entire_model: ClassVar[bool] = False
    unbiased: bool = False
    error_feedback: str = "default"
    feedback_decay: float = 1.0
    homogeneity: int | None = 1
    additive: bool = True

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return the states that the method keeps for a tensor, by name."""
        del shape
        return {}

    def common_state(self) -> dict[str, StateSpec]:
        """Return the states for all tensors of a method of the `entire_model`."""
        return {}

    @property
    def mean_delay(self) -> float:
        """Average number of steps before an entry is sent.

        0 if a part of every entry is sent.
        """
        return 0.0

    @abc.abstractmethod
    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int | None:
        """Return the bytes that one worker sends per step, in all rounds.

        Args:
            shape: shape of the tensor.
            dtype: dtype of the accumulators, float32 or float64.

        Returns:
            A number of bytes; None if it is known only at run time.
        """

    @abc.abstractmethod
    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Send a part of one tensor, and return the sum over workers.

        Args:
            values: gradient, finite, of the tensor's shape, float32 or float64. With
                error feedback it includes the residual. If the inner optimizer is an
                `SGD`, it is multiplied by the learning rate, unless the method's
                `homogeneity` is not 1.
            state: tensors by name, as in `state` and `common_state`.
            keys: seeds for this tensor in this step.

        Yields:
            `AllReduce` or `AllGather`, of the same type and size on all workers.

        Returns:
            A `Result`.
        """

    def native(self, shape: tuple[int, ...]) -> NativeMethod | None:
        """Return the native implementation; None if there is none.

        It produces the same bits as `aggregate` unless it is `all_workers_native`. A
        subclass of a method with a native implementation must define it again to use
        it.

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
        """Create a compressor from `get_config`'s dictionary."""
        return cls(**config)

    def __repr__(self) -> str:
        try:
            values = self.get_config()
        except Exception:  # a schedule without a config, which training allows
            names = inspect.signature(type(self)).parameters
            values = {n: getattr(self, n) for n in names if hasattr(self, n)}
        settings = ", ".join(f"{k}={show(v)}" for k, v in values.items())
        return f"{type(self).__name__}({settings})"


class Sparsifier(Compressor):
    """A method that sends some of the entries.

    Factor masking clears the velocity of these. A subclass may have the attribute
    `sparsity`: the share of entries not sent, or a schedule of it.
    """

    kind = "sparsification"

    @property
    def mean_delay(self) -> float:
        """Average number of steps before an entry is sent.

        With a schedule, for its final sparsity. 0 if the sparsity is not determined.
        """
        sparsity = schedules.final_sparsity(getattr(self, "sparsity", 0.0))
        return sparsity / (1.0 - sparsity)


class Quantizer(Compressor):
    """A method that sends all entries, in fewer bits."""

    kind = "quantization"


class LowRank(Compressor):
    """A method that sends a matrix as factors of lower rank, or in another basis."""

    kind = "low rank"
