"""Local steps: an optimizer that steps alone, and the ends of its rounds.

May import `optimizers`, `adaptive` and `inner`, and rooms from `steps` down.
"""

__all__ = [
    "averaging",
    "delaying",
    "differing",
    "drift",
    "ending",
    "gossiping",
    "inner_state",
    "known",
    "moving",
    "neighbours",
    "optimizer",
    "presets",
    "rounds",
    "rules",
    "shown",
    "turns",
]
