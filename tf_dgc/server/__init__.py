"""Server: a process that keeps the model and the optimizer, and who pushes to it.

May import every room but `launch`, `cli`, `testing` and `callbacks`.
"""

__all__ = [
    "clock",
    "connection",
    "handing",
    "heartbeat",
    "loop",
    "members",
    "messages",
    "model",
    "optimizer",
    "process",
    "pulls",
    "sealing",
    "service",
    "sessions",
    "tasks",
    "validation",
    "worker",
]
