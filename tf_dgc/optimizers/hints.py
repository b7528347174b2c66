"""Hints: where compressing does not pay, and what to do there."""

from tf_dgc.optimizers.compressed import CompressedOptimizer


def hint(optimizer: CompressedOptimizer) -> str | None:
    """Return why compressing does not pay here, and what to do; None if it may.

    Args:
        optimizer: optimizer before its first step, or after one.
    """
    if optimizer.compressor.lossless:
        return None  # nobody asked for less
    if optimizer.num_workers == 1:
        return (
            "there is one worker, which sends nothing, so compressing costs time and "
            "accuracy for nothing. Start several workers, for example by `tf-dgc run "
            "--workers 2 SCRIPT`, or train by the inner optimizer alone"
        )
    stats = optimizer.stats
    if not stats.steps or stats.ratio >= 1 or _was_dense(optimizer):
        return None
    sent = (
        f"a step sends {stats.bytes_per_step} bytes, and without compression it would "
        f"be {stats.dense_bytes_per_step}"
    )
    if optimizer.num_compressed:
        return f"{sent}. Send fewer entries, or {_INNER_ALONE}"
    return (
        f"{sent}: all variables are exempt, being of rank below 2 or of fewer than "
        f"`min_compress_size={optimizer.min_compress_size}` entries. {_SMALLER}, or "
        f"{_INNER_ALONE}"
    )


_INNER_ALONE = "train by the inner optimizer alone, after `tf_dgc.prepare(strategy)`"
_SMALLER = "Pass a smaller `min_compress_size`"


def _was_dense(optimizer: CompressedOptimizer) -> bool:
    """Whether a schedule made the last step a dense one."""
    everything = optimizer.stats.entries_per_step == optimizer.num_entries
    sparsifies = optimizer.compressor.kind == "sparsification"
    return bool(optimizer.num_compressed) and sparsifies and everything
