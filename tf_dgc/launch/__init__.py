"""Launch: one process per worker, here or by ssh, what they print, and their end.

Loads no TensorFlow, and imports nothing of the package.
"""

__all__ = [
    "allocator",
    "display",
    "far_ends",
    "interrupts",
    "launcher",
    "log_records",
    "loopback",
    "onednn",
    "remote",
    "starts",
    "tracebacks",
    "worker_output",
    "worker_processes",
    "worker_start",
]
