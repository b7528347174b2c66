"""What several methods have in common.

May import what methods may: `collectives`, `codecs`, `ops`, `schedules`.
"""

__all__ = [
    "autoencoder",
    "capacity",
    "largest",
    "low_rank",
    "one_round",
    "quantize",
    "sketch",
    "sparse",
    "two_rounds",
]
