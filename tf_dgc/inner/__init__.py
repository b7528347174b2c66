"""The inner optimizer: what the user gives, what is taken over from it, how it updates.

May import rooms from `steps` down.
"""

__all__ = [
    "adam_kinds",
    "conditions",
    "delayed_nesterov",
    "descriptions",
    "loading",
    "native_rules",
    "novograd",
    "rates",
    "settings",
    "taken",
    "takeover",
    "updating",
    "waiting",
    "wrapper",
]
