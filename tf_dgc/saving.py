"""Save a model that several workers train."""

from tf_dgc.multiworker.saving import checkpoint_directory, save_model, save_weights

__all__ = ["checkpoint_directory", "save_model", "save_weights"]
