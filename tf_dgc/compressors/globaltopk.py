"""Global top-k: the k entries of largest magnitude of the whole model."""

import keras

from tf_dgc.compressors.topk import TopK


@keras.saving.register_keras_serializable(package="tf_dgc")
class GlobalTopK(TopK):
    """Sends the k entries of largest magnitude of all tensors together.

    `TopK` sends the same share of every tensor; here one tensor may send many entries
    and another none until its residual has grown. k is computed as for `TopK`, from the
    number of entries of all compressed tensors, at most 2**31 - 1. Dutta et al. compare
    the two in theory and practice ("entire-model" and "layer-wise" compression).

    Args:
        sparsity: share of entries not sent, in [0, 1); or a schedule of the iteration.
        value_dtype: type of the values on the wire, as for `TopK`.
    """

    name = "global_top_k"
    reference = (
        "Dutta et al., On the discrepancy of compressed communication, AAAI 2020"
    )
    entire_model = True
