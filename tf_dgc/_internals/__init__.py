"""Every private TensorFlow and Keras name that the package touches.

Each function says which private names it uses; all were seen in TensorFlow 2.19.1 to
2.21.0 and Keras 3.10.0 to 3.15.1. What is changed are instances that belong to the
caller (a strategy in use, our own copy of an optimizer), no classes and no modules, but
for one function while a strategy is being made (`service.enabling_collectives_by`).
Imports nothing of the package.
"""

__all__ = [
    "ages",
    "averages",
    "checkpoints",
    "creation",
    "groups",
    "keras_files",
    "keras_optimizers",
    "keras_rules",
    "launching",
    "learning_rates",
    "mirrored",
    "optimizer_copies",
    "row_rules",
    "rpc",
    "service",
    "stores",
    "threads",
    "tracing",
    "trainer",
]
