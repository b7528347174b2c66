"""Worker processes forked from a process that has already imported TensorFlow.

The imports take longer than most of the tests' work. Each worker runs a script as
`python script` does, to the end of the interpreter. Run as a program, this file is the
server.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import time
import types

_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


class ForkServer:
    """A process that forks workers; leaving the context ends it and its workers."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self._partial_line = b""
        self._pids = []
        self._codes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._process:
            self._process.stdin.close()

    def start(self, command, environment, log):
        """Start a worker in a session of its own.

        Args:
            command: path of a script, and its arguments.
            environment: all environment variables.
            log: path of the file to which its output is appended.
        """
        request = {"command": command, "environment": environment, "log": log}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while not self._pids:  # first it has to import TensorFlow
            self._read(None)
        return Worker(self, self._pids.pop())

    def wait(self, pid, timeout):
        """Return the exit code of a worker; raise as `Popen.wait` does."""
        deadline = time.monotonic() + timeout
        while pid not in self._codes:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"worker {pid}", timeout)
            self._read(left)
        return self._codes[pid]

    def _read(self, seconds):
        """Read the server's messages, waiting at most this long for one."""
        output = self._process.stdout.fileno()
        if not select.select([output], [], [], seconds)[0]:
            return
        data = os.read(output, 4096)
        if not data:
            raise RuntimeError("the fork server has ended")
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            pid, code = json.loads(line)
            if code is None:
                self._pids.append(pid)
            else:
                self._codes[pid] = code


class Worker:
    """A forked worker, with the part of `Popen` that `worker_processes` uses."""

    stdin = None

    def __init__(self, server, pid):
        self._server = server
        self.pid, self.returncode = pid, None

    def wait(self, timeout):
        try:
            self.returncode = self._server.wait(self.pid, timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
                time.sleep(1.0)  # until the worker has written its stacks
            raise
        return self.returncode


# --- the process ----------------------------------------------------------------------


def serve():
    """Fork a worker for each line of standard input; return its command in the worker.

    Prints `[pid, null]` when a worker starts, and `[pid, exit code]` when it ends.
    """
    server = os.getpid()
    partial_line = b""
    pids = {}  # by a descriptor that becomes readable when the worker ends
    while True:
        for ready in select.select([0, *pids], [], [])[0]:
            if ready == 0:
                chunk = os.read(0, 1 << 16)
                if not chunk:
                    sys.exit()  # and the kernel ends the workers
                *requests, partial_line = (partial_line + chunk).split(b"\n")
                for request in requests:
                    pid = os.fork()
                    if not pid:
                        return become_worker(server, **json.loads(request))
                    pids[os.pidfd_open(pid)] = pid
                    report(pid, None)
            else:
                pid = pids.pop(ready)
                os.close(ready)
                report(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def report(pid, code):
    print(json.dumps([pid, code]), flush=True)


def become_worker(server, command, environment, log):
    """Set up this forked process as if a shell had started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != server:
        sys.exit("the fork server has ended")
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull) as nothing, open(log, "a") as output:
        for stream, descriptor in enumerate([nothing, output, output]):
            os.dup2(descriptor.fileno(), stream)
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of a worker that hangs
    return command


def run(command):
    """Run a script as the main program."""
    sys.argv = command
    sys.path.insert(0, os.path.dirname(command[0]))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = command[0]
    with open(command[0]) as script:
        code = compile(script.read(), command[0], "exec")
    exec(code, vars(main))


if __name__ == "__main__":
    import gc

    sys.modules["sklearn"] = None  # Keras would load it, which takes 1 s and more
    import keras  # noqa: F401
    import numpy as np
    import tensorflow as tf  # noqa: F401

    import tf_dgc  # noqa: F401

    del sys.modules["sklearn"]
    with contextlib.suppress(ImportError):
        import h5py  # noqa: F401
    gc.freeze()
    command = serve()
    np.random.seed()
    run(command)
