"""The server's checkpoint: one file, complete or not at all, from time to time."""

import contextlib
import json
import os
import pathlib
import tempfile
import time
import zipfile
from collections.abc import Callable

import numpy as np

from tf_dgc.multiworker.saving import replacing, unfinished
from tf_dgc.server.model import RestoredModel, ServerModel
from tf_dgc.server.service import Service

DIRECTORY_VARIABLE = "TF_DGC_SERVER_DIR"
SECONDS_VARIABLE = "TF_DGC_SERVER_SECONDS"
_SECONDS = 60.0
_UNREADABLE = (
    *(EOFError, KeyError, OSError, TypeError, ValueError),
    zipfile.BadZipFile,
)


class ServerCheckpoint:
    """Writes what the server knows, and reads it when it is started again.

    That are weights, the optimizer's state, clock and what workers handed over. When
    all have done their part the file is removed, as nothing is to go on from there.

    Several servers write files of their own, at the same time by the machines' clocks,
    and not as they end, so that all are of about the same update.

    Args:
        directory: path of the directory of the file.
        seconds: seconds from one writing to the next.
        say: function that is given lines of the log.
        shard: index of this server, and number of servers.
        now: function that returns the time, in seconds, the same on all machines.
        run: number of the run, from 0.
    """

    def __init__(
        self,
        directory: str,
        seconds: float,
        say: Callable[[str], None],
        shard: tuple[int, int] = (0, 1),
        now: Callable[[], float] = time.time,
        run: int = 0,
    ):
        name = f"server-{shard[0]}" if shard[0] else "server"
        name += f"-run-{run + 1}" if run else ""
        self.path = pathlib.Path(directory) / f"{name}.npz"
        self._shard, self._is_alone = shard, shard[1] == 1
        self._seconds, self._say, self._now = seconds, say, now
        self._written: tuple[int, int] | None = None  # in which period; and the clock

    @classmethod
    def of_environment(
        cls, say: Callable[[str], None], shard: tuple[int, int] = (0, 1)
    ) -> "ServerCheckpoint | None":
        """Return what the environment variables `TF_DGC_SERVER_*` say; None for none.

        Args:
            say: function that is given lines of the log.
            shard: index of this server, and number of servers.

        Raises:
            ValueError: if the seconds are not a positive number.
            RuntimeError: if nothing can be written to the directory.
        """
        directory = os.environ.get(DIRECTORY_VARIABLE)
        text = os.environ.get(SECONDS_VARIABLE, str(_SECONDS))
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise ValueError(
                f"The environment variable {SECONDS_VARIABLE} must be a positive "
                f"number of seconds. Received: {text!r}"
            )
        if not directory:
            return None
        _try_to_write_to(directory)
        return cls(directory, seconds, say, shard)

    def of_run(self, run: int, say: Callable[[str], None]) -> "ServerCheckpoint":
        """Return the checkpoint of a run, in a file of its own.

        Args:
            run: number of the run, from 0, whose checkpoint this one is.
            say: function that is given lines of its log.
        """
        directory, by = str(self.path.parent), (self._shard, self._now, run)
        return ServerCheckpoint(directory, self._seconds, say, *by)

    def restore(self, service: Service) -> None:
        """Let a server go on from the file, if there is one.

        Args:
            service: service that nobody has joined.

        Raises:
            RuntimeError: if the file cannot be read.
        """
        self._remove_left()
        if not self.path.exists():
            return
        try:
            with open(self.path, "rb") as file, np.load(file) as found:
                handed = json.loads(found["handed"].tobytes())
                words, clock = found["words"], int(found["clock"])
                restored = RestoredModel(
                    self.path, handed, words, clock, float(found["rate"])
                )
        except _UNREADABLE as error:
            raise RuntimeError(
                f"tf_dgc: the server cannot go on from {self.path}: {error}. Remove it "
                "to begin anew."
            ) from error
        service.restore(restored)
        self._say(f"goes on from {self.path}, at update {clock}")

    def _remove_left(self) -> None:
        """Remove what a server left that was killed as it wrote; no other writes it."""
        with contextlib.suppress(OSError):
            for path in unfinished(self.path):
                path.unlink(missing_ok=True)

    def write_if_due(self, service: Service) -> None:
        """Write the file, if another period has begun and there is something new.

        What cannot be written is said, and tried again in the next period: it is no
        reason to end what has taken long.

        Args:
            service: service to be saved.
        """
        if service.model is None:
            return
        period = int(self._now() // self._seconds)
        if self._written is None:
            self._written = period, -1
        elif period != self._written[0]:
            done = self._written[1]
            if done != service.model.clock and self._write(service, service.model):
                done = service.model.clock
            self._written = period, done

    def end(self, service: Service) -> None:
        """Remove the file, if all have done their part; else write it, if it is alone.

        Args:
            service: service that is over.
        """
        if service.is_done:
            self._remove()
        elif self._is_alone and service.model is not None:
            self._write(service, service.model)

    def _remove(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self._say(f"cannot remove {self.path}, though all is done: {error}")

    def _write(self, service: Service, model: ServerModel) -> bool:
        """Write the file; return whether it was."""
        handed = np.frombuffer(json.dumps(service.handed).encode(), np.uint8)
        try:
            with replacing(self.path) as mine, open(mine, "wb") as file:
                np.savez(
                    file,
                    handed=handed,
                    words=model.state(),
                    clock=np.int64(model.clock),
                    rate=np.float64(model.rate),
                )
        except OSError as error:
            self._say(f"cannot write {self.path} at update {model.clock}: {error}")
            return False
        return True


def _try_to_write_to(directory: str) -> None:
    """Make the directory, and a file in it that is gone again.

    Raises:
        RuntimeError: if that cannot be.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise RuntimeError(
            f"tf_dgc: the server cannot write its checkpoints to {directory!r}, the "
            f"environment variable {DIRECTORY_VARIABLE}: {error}"
        ) from error
