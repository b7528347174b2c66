"""Local steps with the settings of their papers."""

from typing import Any

import keras

from tf_dgc import schedules
from tf_dgc.arguments import show
from tf_dgc.compressors import ChunkedTopK
from tf_dgc.local.optimizer import LocalOptimizer


def local_sgd(inner: Any, period: Any = 8, **settings: Any) -> LocalOptimizer:
    """Return local SGD: workers average their weights every few steps.

    Stich, "Local SGD converges fast and communicates little", ICLR 2019.

    Args:
        inner: optimizer of the steps of one worker, the paper's is `SGD`.
        period: number of local steps from one average to the next, or a schedule.
        **settings: further arguments of `LocalOptimizer`.
    """
    return LocalOptimizer(inner, period, **settings)


def post_local_sgd(
    inner: Any, begin: int, period: int = 8, **settings: Any
) -> LocalOptimizer:
    """Return post-local SGD: an average in every step at first, then every few.

    Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020, which begins
    at the first decay of the learning rate.

    Args:
        inner: optimizer of the steps of one worker, the paper's is `SGD` with momentum.
        begin: number of steps after each of which all workers exchange, 1 or more.
        period: number of local steps from one average to the next from then on.
        **settings: further arguments of `LocalOptimizer`.
    """
    begin = schedules.check_period(begin, "begin")
    steps = schedules.PiecewiseConstantPeriod([begin], [1, period])
    return LocalOptimizer(inner, steps, **settings)


def diloco(inner: Any = None, period: Any = 500, **settings: Any) -> LocalOptimizer:
    """Return DiLoCo: AdamW on each worker, Nesterov's momentum on what they move.

    Douillard et al., "DiLoCo: Distributed low-communication training of language
    models", 2023: AdamW of a rate of 4e-4 and a decay of 0.1, and SGD of a rate of 0.7
    and a momentum of 0.9.

    Args:
        inner: optimizer of the steps of one worker; None for the paper's.
        period: number of local steps from one exchange to the next, or a schedule.
        **settings: further arguments of `LocalOptimizer`, `outer` too.
    """
    inner = keras.optimizers.AdamW(4e-4, weight_decay=0.1) if inner is None else inner
    nesterov = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    return LocalOptimizer(inner, period, **{"outer": nesterov, **settings})


def sparse_loco(
    inner: Any = None, period: Any = 30, decay: float | None = None, **settings: Any
) -> LocalOptimizer:
    """Return SparseLoCo: of every chunk of what AdamW moved the largest 64, in 2 bits.

    Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025. What
    is not sent is kept, and decays: that takes the place of an outer momentum, and the
    mean is applied as it is. See `tf_dgc.compressors.ChunkedTopK`.

    Args:
        inner: optimizer of the steps of one worker; None for `AdamW(4e-4)`.
        period: number of local steps from one exchange to the next, or a schedule.
        decay: share of what was not sent that is kept, in (0, 1]; None for the paper's
            0.95, or what a `compressor` of your own has.
        **settings: further arguments of `LocalOptimizer`, `compressor` and `outer` too.

    Raises:
        ValueError: for both `decay` and `compressor`, and as `LocalOptimizer`.
    """
    inner = keras.optimizers.AdamW(4e-4) if inner is None else inner
    if decay is not None and "compressor" in settings:
        raise ValueError(
            "`decay` is a setting of the preset's own method. Pass it to yours, for "
            "example `compressor=ChunkedTopK(per_chunk=32, decay=0.9)`. Received: "
            f"decay={show(decay)}, compressor={show(settings['compressor'])}"
        )
    method = ChunkedTopK(decay=0.95 if decay is None else decay)
    return LocalOptimizer(inner, period, **{"compressor": method, **settings})
