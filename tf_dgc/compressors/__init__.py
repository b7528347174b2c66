"""Compressors: which entries of a tensor are sent, and with what value."""

from tf_dgc.compressors.topk import num_sent, tie_offsets, top_k

__all__ = ["num_sent", "tie_offsets", "top_k"]
