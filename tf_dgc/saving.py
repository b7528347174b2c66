"""Saving a model that several workers train; see `tf_dgc.checkpoint.saving`."""

from tf_dgc.multiworker.saving import checkpoint_directory, save_model, save_weights

__all__ = ["checkpoint_directory", "save_model", "save_weights"]
