"""The watchdog process, which ends a worker that is stuck after others have gone."""

import contextlib
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tf_dgc.multiworker import watchdog_process

SCRIPT = pathlib.Path(watchdog_process.__file__)
PATIENCE = 0.5

# A program that starts the watchdog, as a worker does, writes words to it, and sleeps.
WORKER = f"""
import faulthandler, os, signal, subprocess, sys, time

number = signal.SIGRTMIN + 11
faulthandler.register(number, file=2)
program = [sys.executable, "-I", "-S", {str(SCRIPT)!r}, str(os.getpid()), str(number)]
program += ["{PATIENCE}", "worker 1", *sys.argv[2:]]
process = subprocess.Popen(program, stdin=subprocess.PIPE)


def get_stuck():
    for word in sys.argv[1].encode():
        os.write(process.stdin.fileno(), bytes([word]))
        time.sleep(0.2)
    time.sleep(1000)


get_stuck()
"""


@contextlib.contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def worker(words, *addresses):
    command = [sys.executable, "-c", WORKER, words, *addresses]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_stuck_worker_is_ended_with_its_stack():
    with (
        listening() as (server, gone),
        listening() as (_, there),
        worker("+=", there, gone) as process,
    ):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(5 * PATIENCE)  # no peer is gone
        server.close()
        assert process.wait(60.0) == -signal.SIGKILL
        output = process.stderr.read()
    assert re.search(r"worker 1 has made no progress for \d+ s, outside of all", output)
    assert f"the worker at {gone} is gone. Ending this process" in output
    assert "in get_stuck" in output
    assert output.splitlines()[-1].startswith("tf_dgc: worker 1 was ended, because it")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "+=-",  # needs no other worker any more
        "+=" * 40,  # makes progress
        "-",
    ],
)
def test_a_worker_that_is_not_stuck_continues(words):
    with listening() as (server, gone), worker(words, gone) as process:
        time.sleep(2 * PATIENCE)
        server.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(8 * PATIENCE)


@pytest.mark.slow
def test_a_peer_that_was_never_there_is_not_gone():
    with listening() as (server, never):
        server.close()
        with worker("+=", never) as process, pytest.raises(subprocess.TimeoutExpired):
            process.wait(6 * PATIENCE)


def test_a_peer_whose_port_is_taken_over_is_gone():
    """A restarted worker listens on the same port."""
    with listening() as (server, address):
        port = server.getsockname()[1]
        peers = watchdog_process.Peers([address])
        peers.look()
        assert peers.gone() is None
        server.close()
        peers.look()
        assert peers.gone() is None  # it may not have answered in time
        peers.look()
        with socket.create_server(("127.0.0.1", port)):
            peers.look()
        where, since = peers.gone()
    assert where == address
    assert since <= time.monotonic()


def test_it_ends_with_the_worker():
    with listening() as (_, address), worker("+", address) as process:
        time.sleep(1.0)
        process.kill()
        process.wait()
        process.stderr.read()  # until no process can write there any more
