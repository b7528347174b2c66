"""What all workers know of a tensor before the step."""

import math
from typing import NamedTuple

import tensorflow as tf


class TensorSpec(NamedTuple):
    """What is known of a tensor before the step.

    Attributes:
        label: name for errors, for example the path of the variable.
        shape: shape of the tensor and its variable, of 0 entries or more.
        dtype: dtype of what is accumulated, float32 or float64.
        uncompressed: whether it is always sent whole, not compressed.
        value_dtype: type of the values on the wire, one of `value_types.CHOICES` or
            "float64"; None for `dtype`. Without meaning if exempt.
        uncompressed_dtype: the same if exempt, one of `value_types.EXEMPT_CHOICES`;
            None for `dtype`. Without meaning if not.
        narrow: dtype of the variable, if that holds less than `dtype`, else None.
        largest: bound of what one worker sends of an entry, a power of two, so that the
            sum does not overflow (`value_types.largest_share`); the rest stays in the
            residual.
    """

    label: str
    shape: tuple[int, ...]
    dtype: tf.DType
    uncompressed: bool
    value_dtype: str | None = None
    uncompressed_dtype: str | None = None
    narrow: tf.DType | None = None
    largest: float = math.inf

    @property
    def size(self) -> int:
        """Number of entries, n."""
        return math.prod(self.shape)

    @property
    def value_type(self) -> str:
        """Type of the values on the wire, by name."""
        chosen = self.uncompressed_dtype if self.uncompressed else self.value_dtype
        return chosen or self.dtype.name

    @property
    def wire_name(self) -> str:
        """Name of how it travels: its value type, "exempt", or "exempt:" and a type."""
        if not self.uncompressed:
            return self.value_type
        return (
            f"exempt:{self.uncompressed_dtype}" if self.uncompressed_dtype else "exempt"
        )

    @property
    def agreed(self) -> str:
        """Text of what must be equal on all workers, without spaces."""
        return self.agreed_by(self.value_type)

    def agreed_by(self, method: str) -> str:
        """Return that text, of a tensor that a method sends unless it is exempt."""
        name = self.wire_name if self.uncompressed else method
        return f"{self.size}:{self.dtype.name}:{name}"
