"""Advice: what a step would take by each method, before the first run.

Times a model here, and predicts by the model of `exchange="auto"`. May import
`reports` and what that may.
"""

__all__ = [
    "advising",
    "batches",
    "candidates",
    "measuring",
    "predicting",
    "timing",
    "units",
]
