"""Server: a process that keeps the model and the optimizer, and who pushes to it.

May import `local` and what that may.
"""

__all__ = [
    "admission",
    "changed",
    "clock",
    "configs",
    "connection",
    "copies",
    "corrections",
    "handing",
    "heartbeat",
    "joining",
    "links",
    "loop",
    "members",
    "messages",
    "model",
    "optimizer",
    "process",
    "pulls",
    "pushes",
    "rows",
    "runs",
    "saved",
    "sealing",
    "service",
    "sessions",
    "sharding",
    "tables",
    "tabular",
    "tasks",
    "turns",
    "validation",
    "worker",
]
