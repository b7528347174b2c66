"""Checkpoint: saving and resuming where several workers train one model.

Files are complete or not there at all. May import `training` and `cluster`.
"""

__all__ = [
    "backup",
    "generations",
    "hdf5",
    "keras_saving",
    "one_path",
    "parts",
    "position",
    "resuming",
    "saving",
]
