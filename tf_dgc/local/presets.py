"""Presets of `LocalOptimizer` with the settings of their papers."""

from typing import Any

import keras

from tf_dgc import schedules
from tf_dgc.arguments import show
from tf_dgc.compressors import ChunkedTopK
from tf_dgc.local.optimizer import LocalOptimizer


def local_sgd(inner: Any, period: Any = 8, **settings: Any) -> LocalOptimizer:
    """Return local SGD: workers average their weights every `period` steps.

    Stich, "Local SGD converges fast and communicates little", ICLR 2019.

    Args:
        inner: optimizer for local steps; `SGD` in the paper.
        period: number of local steps in a round, or a schedule.
        **settings: further arguments of `LocalOptimizer`.
    """
    return LocalOptimizer(inner, period, **settings)


def post_local_sgd(
    inner: Any, begin: int, period: int = 8, **settings: Any
) -> LocalOptimizer:
    """Return post-local SGD: averages in every step first, then every `period` steps.

    Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020. There `begin`
    is the first decay of the learning rate.

    Args:
        inner: optimizer for local steps; `SGD` with momentum in the paper.
        begin: number of steps that each end with an average, 1 or more.
        period: number of local steps in a round afterwards.
        **settings: further arguments of `LocalOptimizer`.
    """
    begin = schedules.check_period(begin, "begin")
    steps = schedules.PiecewiseConstantPeriod([begin], [1, period])
    return LocalOptimizer(inner, steps, **settings)


def diloco(inner: Any = None, period: Any = 500, **settings: Any) -> LocalOptimizer:
    """Return DiLoCo: AdamW on each worker, SGD with Nesterov momentum on the mean.

    Douillard et al., "DiLoCo: Distributed low-communication training of language
    models", 2023. Inner: learning rate 4e-4, weight decay 0.1. Outer: learning rate
    0.7, momentum 0.9.

    Args:
        inner: optimizer for local steps; None for the paper's.
        period: number of local steps in a round, or a schedule.
        **settings: further arguments of `LocalOptimizer`, `outer` included.
    """
    inner = keras.optimizers.AdamW(4e-4, weight_decay=0.1) if inner is None else inner
    nesterov = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    return LocalOptimizer(inner, period, **{"outer": nesterov, **settings})


def sparse_loco(
    inner: Any = None, period: Any = 30, decay: float | None = None, **settings: Any
) -> LocalOptimizer:
    """Return SparseLoCo: the 64 largest entries of each chunk are sent, in 2 bits each.

    Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025. The
    decaying residual takes the place of an outer momentum; the mean is applied as it
    is. See `tf_dgc.compressors.ChunkedTopK`.

    Args:
        inner: optimizer for local steps; None for `AdamW(4e-4)`.
        period: number of local steps in a round, or a schedule.
        decay: share of the residual that is kept in each round, in (0, 1]; None for the
            paper's 0.95, or that of `compressor` if you pass one.
        **settings: further arguments of `LocalOptimizer`, `compressor` and `outer`
            included.

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
