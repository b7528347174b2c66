"""`tf-dgc serve`."""

import sys

from tf_dgc.server import process, tasks


def main() -> int:
    """Serve the cluster of `TF_CONFIG` and exit; return the exit code of an error."""
    try:
        task = tasks.find_task()
        if task.worker is not None:
            raise ValueError(
                "This process must be a server, a task of type `ps`, according to the "
                "environment variable TF_CONFIG. Received: a worker's task, with index "
                f"{task.worker}"
            )
        process.serve_and_exit(task)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"tf-dgc: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
