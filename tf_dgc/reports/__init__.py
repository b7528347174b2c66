"""Reports: pages of HTML about a run, or about advice.

A run is a record that `CompressionMonitor` wrote, or a directory of TensorBoard's.
Pictures need matplotlib. May import `local` and what that may.
"""

__all__ = [
    "logdir",
    "of_advice",
    "of_runs",
    "page",
    "pictures",
    "record",
    "recording",
    "sizes",
]
