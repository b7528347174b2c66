"""Specs of tensors, the same on all workers."""

import math
from typing import NamedTuple

import tensorflow as tf


class TensorSpec(NamedTuple):
    """What all workers know of a tensor before a step.

    Attributes:
        label: name for errors, for example the path of the variable.
        shape: shape of the tensor and its variable; it may have no entries.
        dtype: dtype of the accumulators, float32 or float64.
        uncompressed: whether the tensor is always sent whole.
        value_dtype: type of a compressed tensor's values on the wire, one of
            `value_types.CHOICES` or "float64"; None for `dtype`.
        uncompressed_dtype: likewise of an uncompressed tensor, one of
            `value_types.UNCOMPRESSED_CHOICES`; None for `dtype`.
        narrow_dtype: dtype of the variable if narrower than `dtype`, else None.
        max_magnitude: largest magnitude that one worker sends, a power of two, so that
            the sum does not overflow; the excess stays in the residual.
    """

    label: str
    shape: tuple[int, ...]
    dtype: tf.DType
    uncompressed: bool
    value_dtype: str | None = None
    uncompressed_dtype: str | None = None
    narrow_dtype: tf.DType | None = None
    max_magnitude: float = math.inf

    @property
    def size(self) -> int:
        """Number of entries, n."""
        return math.prod(self.shape)

    @property
    def value_type(self) -> str:
        """Name of the type of the values on the wire."""
        name = self.uncompressed_dtype if self.uncompressed else self.value_dtype
        return name or self.dtype.name

    @property
    def wire_name(self) -> str:
        """Value type, "exempt", or "exempt:" and a value type (wire_format.md)."""
        if not self.uncompressed:
            return self.value_type
        suffix = f":{self.uncompressed_dtype}" if self.uncompressed_dtype else ""
        return f"exempt{suffix}"

    @property
    def signature(self) -> str:
        """Text that must be the same on all workers, without spaces."""
        return self.signature_of(self.value_type)

    def signature_of(self, method: str) -> str:
        """Return the signature of the tensor as sent by a method."""
        name = self.wire_name if self.uncompressed else method
        return f"{self.size}:{self.dtype.name}:{name}"
