"""What papers print, and how they count bytes."""

import math

from tf_dgc.compressors import num_sent

# Lin et al., Deep Gradient Compression, ICLR 2018: ResNet-110 on CIFAR-10, 164 epochs,
# 32 images per worker, one seed; accuracy of dense and DGC in per cent by workers.
CIFAR10 = {4: (93.75, 93.87), 8: (92.92, 93.28)}
# And 2 x 1500 LSTM on Penn Treebank, 4 workers: perplexity, and the ratio of bytes.
PTB = (72.30, 72.24, 462)

_ENTRY = 6  # bytes: the paper's printed ratios follow from that
_DENSE = 4


def ratio(shapes, sparsity=0.999):
    """Return dense by sent bytes as the paper counts: after warm-up, 6 bytes an entry.

    Tensors of one dimension are sent whole.

    Args:
        shapes: shapes of the variables that are trained.
        sparsity: share of entries not sent.
    """
    sizes = [(math.prod(shape), len(shape) > 1) for shape in shapes]
    sent = sum(
        _ENTRY * num_sent(n, sparsity) if compressed else _DENSE * n
        for n, compressed in sizes
    )
    return _DENSE * sum(n for n, _ in sizes) / sent
