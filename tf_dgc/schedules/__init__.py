"""Schedules: sparsity, or the period of exchanges, as a function of the iteration.

Lin et al., ICLR 2018, section 3.3 (warm-up training): while the network changes fast,
large residuals do harm, so sparsity starts low and grows. So does the period of local
steps (Lin et al., ICLR 2020).
"""

from tf_dgc.schedules.periods import PiecewiseConstantPeriod
from tf_dgc.schedules.sparsities import (
    PiecewiseConstantSparsity,
    SparsitySchedule,
    WarmupSparsity,
    for_steps,
)

__all__ = [
    "PiecewiseConstantPeriod",
    "PiecewiseConstantSparsity",
    "SparsitySchedule",
    "WarmupSparsity",
    "for_steps",
]
