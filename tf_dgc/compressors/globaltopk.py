"""Compress: choose the k entries of largest magnitude of the whole model."""

import keras

from tf_dgc.compressors.topk import TopK


@keras.saving.register_keras_serializable(package="tf_dgc")
class GlobalTopK(TopK):
    """Sends the k entries of largest magnitude among those of all tensors together.

    `TopK` takes the same share of every tensor; here one tensor may send many entries
    and another none, until its residual has grown. n, of which k is `TopK`'s share, is
    the number of entries of all that are not exempt, 2**31 - 1 at most. Compared in
    theory and practice by Dutta et al. ("entire-model" against "layer-wise"
    compression).

    Args:
        sparsity: share of entries not sent, in [0, 1); or a schedule of the iteration.
        value_dtype: type of the values on the wire, as for `TopK`.
    """

    name = "global_top_k"
    reference = (
        "Dutta et al., On the discrepancy of compressed communication, AAAI 2020"
    )
    together = True
