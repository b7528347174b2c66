"""`tf-dgc serve`."""

import sys

from tf_dgc.server import process, tasks


def main() -> int:
    """Serve the cluster of `TF_CONFIG`; return the exit code."""
    try:
        task = tasks.find_task()
        if task.worker is not None:
            raise ValueError(
                "This process must be the server, a task of type `ps`, by the "
                "environment variable TF_CONFIG. Received: a task of a worker, of "
                f"index {task.worker}"
            )
        listened = process.serve(task)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"tf-dgc: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    process.leave_server(listened)
