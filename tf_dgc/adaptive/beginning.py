"""From which step on an Adam is corrected: the first that leaves something out."""

from collections.abc import Sequence

import tensorflow as tf

from tf_dgc.adaptive.agreement import Agreement
from tf_dgc.choice import Choice
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import Compressor, TopK
from tf_dgc.metrics import counting
from tf_dgc.steps import fused
from tf_dgc.steps.base import Inputs
from tf_dgc.steps.memory import Memory


class Beginning:
    """Counts corrected steps, alike on all workers.

    Until then steps are *stock*: everything is sent, and the optimizer's own rule is
    applied to the sum.

    Args:
        compressor: method of the tensors that are not exempt; None if it was chosen to
            send everything in every step.
        memory: memory of all tensors, the sample's last.
        agreement: agreement of those that are not exempt.

    Attributes:
        steps: variable, number of corrected steps.
    """

    def __init__(
        self, compressor: Compressor | None, memory: Memory, agreement: Agreement
    ):
        self._compressor = compressor
        self._agreement = agreement
        self.steps = counting.make_count("adam_corrected_steps")
        self._may_be_stock = self._goes_dense(memory.tensors, None)

    def count(self, inputs: Inputs) -> tuple[Choice, Choice]:
        """Count a step; return whether correction begins in it, or it is a stock one.

        It begins where stock steps came before, of this run or of one that it goes on
        from: there a schedule, or the number of workers, may have sent everything.

        Args:
            inputs: inputs of the step, without the sample.
        """
        none = tf.equal(self.steps.value, 0)
        crosses = tf.logical_and(none, inputs.iteration > 0)
        if not self._may_be_stock:
            self.steps.assign_add(1)
            return crosses, False
        layout = [*inputs.tensors, self._agreement.tensor]
        stock = tf.logical_and(self._goes_dense(layout, inputs.iteration), none)
        corrected = tf.logical_not(stock)
        self.steps.assign_add(tf.cast(corrected, tf.int64))
        return tf.logical_and(corrected, crosses), stock

    def is_stock(self) -> Choice:
        """Return whether the step that was counted last is a stock one."""
        return self._may_be_stock and tf.equal(self.steps.value, 0)

    def _goes_dense(
        self, tensors: Sequence[Tensor], iteration: tf.Tensor | None
    ) -> Choice:
        """Return whether a step does, or if its number is None, whether any may."""
        if self._compressor is None:
            return True
        if not isinstance(self._compressor, TopK):
            return False
        number = self._agreement.num_workers
        return fused.goes_dense(self._compressor, tensors, iteration, number)
