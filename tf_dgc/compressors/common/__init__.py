"""What several methods have in common.

May import what methods may: `collectives`, `codecs`, `schedules`.
"""

__all__ = [
    "autoencoder",
    "capacity",
    "low_rank",
    "one_round",
    "quantize",
    "sketch",
    "sparse",
    "two_rounds",
]
