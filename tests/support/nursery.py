"""Worker processes that need not import TensorFlow: forks of one that has.

The imports take longer than most of what workers do in the tests. A nursery has done
them and used nothing yet; each of its workers runs a script as `python script` does,
to the end of the interpreter. Run as a file, this is the nursery.
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


class Nursery:
    """A process that starts workers; leaving the context ends it and them."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self._begun = b""  # of a line
        self._pids = []
        self._codes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._process:
            self._process.stdin.close()

    def start(self, command, environment, log):
        """Start a worker, which leads a session, and writes to a file.

        Args:
            command: path of a script, and its arguments.
            environment: all environment variables.
            log: path of the file, which is appended to.
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
        """Take in what the nursery says, waiting so long for it at most."""
        answers = self._process.stdout.fileno()
        if not select.select([answers], [], [], seconds)[0]:
            return
        said = os.read(answers, 4096)
        if not said:
            raise RuntimeError("the nursery has ended")
        *lines, self._begun = (self._begun + said).split(b"\n")
        for line in lines:
            pid, code = json.loads(line)
            if code is None:
                self._pids.append(pid)
            else:
                self._codes[pid] = code


class Worker:
    """What `worker_processes.end` needs of a `Popen`."""

    stdin = None

    def __init__(self, nursery, pid):
        self._nursery = nursery
        self.pid, self.returncode = pid, None

    def wait(self, timeout):
        try:
            self.returncode = self._nursery.wait(self.pid, timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
                time.sleep(1.0)  # until it is written
            raise
        return self.returncode


# --- the process ----------------------------------------------------------------------


def serve():
    """Fork a worker for each line of standard input; return there what it is to run.

    Says `[pid, null]` when a worker was started, and `[pid, exit code]` when it ended.
    """
    own, read = os.getpid(), b""
    ends = {}  # of workers: a descriptor that can be read then
    while True:
        for ready in select.select([0, *ends], [], [])[0]:
            if ready == 0:
                chunk = os.read(0, 1 << 16)
                if not chunk:
                    sys.exit()  # and the kernel ends the workers
                *requests, read = (read + chunk).split(b"\n")
                for request in requests:
                    pid = os.fork()
                    if not pid:
                        return become(own, **json.loads(request))
                    ends[os.pidfd_open(pid)] = pid
                    say(pid, None)
            else:
                pid = ends.pop(ready)
                os.close(ready)
                say(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def say(pid, code):
    print(json.dumps([pid, code]), flush=True)


def become(nursery, command, environment, log):
    """Make this process, just forked, what a shell would have started."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != nursery:
        sys.exit("the nursery is gone")
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull) as nothing, open(log, "a") as output:
        for stream, descriptor in enumerate([nothing, output, output]):
            os.dup2(descriptor.fileno(), stream)
    faulthandler.register(signal.SIGUSR1)  # of who hangs: where all threads are
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
