"""Figures that papers report, and how they count bytes."""

import math

from tf_dgc.compressors import num_sent

# Lin et al., Deep Gradient Compression, ICLR 2018: ResNet-110 on CIFAR-10, 164 epochs,
# 32 images per worker, one seed; accuracy of dense and DGC in per cent, by number of
# workers.
CIFAR10 = {4: (93.75, 93.87), 8: (92.92, 93.28)}
# The same paper, 2 x 1500 LSTM on Penn Treebank, 4 workers: perplexity of dense and
# DGC, and the ratio of bytes.
PTB = (72.30, 72.24, 462)

_SPARSE_ENTRY_BYTES = 6  # follows from the paper's ratios
_DENSE_ENTRY_BYTES = 4


def ratio(shapes, sparsity=0.999):
    """Return the compression ratio as the paper counts it.

    It counts 6 bytes per entry after warm-up, and sends tensors of one dimension
    uncompressed.

    Args:
        shapes: shapes of the trainable variables.
        sparsity: share of entries not sent.
    """
    sizes = [(math.prod(shape), len(shape) > 1) for shape in shapes]
    num_bytes = sum(
        _SPARSE_ENTRY_BYTES * num_sent(n, sparsity)
        if compressed
        else _DENSE_ENTRY_BYTES * n
        for n, compressed in sizes
    )
    return _DENSE_ENTRY_BYTES * sum(n for n, _ in sizes) / num_bytes
