"""Steps: one worker's way from gradients to what is sent, and from replies to sums.

May import everything below `inner` but knows nothing of Keras optimizers.
"""

__all__ = [
    "accumulation",
    "base",
    "between_rounds",
    "composed",
    "engine",
    "engine_calls",
    "engine_on_gpu",
    "fused",
    "inside",
    "kinds",
    "memory",
    "native",
    "native_update",
    "near",
    "operations",
    "plan",
    "pushing",
    "receiving",
    "settling",
    "views",
    "weighing",
]
