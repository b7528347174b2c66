"""The server's checkpoint: one file, written atomically and periodically."""

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
_DEFAULT_SECONDS = 60.0
_READ_ERRORS = (EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile)


class ServerCheckpoint:
    """Writes a server's state, and restores it when the server is restarted."""

    # Several servers write a file each, at multiples of `seconds` of the machines'
    # clocks, and not when they end, so that all files are of about the same update.

    def __init__(
        self,
        directory: str,
        seconds: float,
        log: Callable[[str], None],
        shard: tuple[int, int] = (0, 1),
        now: Callable[[], float] = time.time,
        run: int = 0,
    ):
        name = f"server-{shard[0]}" if shard[0] else "server"
        name += f"-run-{run + 1}" if run else ""
        self.path = pathlib.Path(directory) / f"{name}.npz"
        self._shard = shard
        self._seconds, self._log, self._now = seconds, log, now
        self._last_period: int | None = None
        self._saved_clock = -1

    @classmethod
    def from_environment(
        cls, log: Callable[[str], None], shard: tuple[int, int] = (0, 1)
    ) -> "ServerCheckpoint | None":
        """Return the checkpoint that `TF_DGC_SERVER_*` configure, or None."""
        directory = os.environ.get(DIRECTORY_VARIABLE)
        text = os.environ.get(SECONDS_VARIABLE, str(_DEFAULT_SECONDS))
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
        _check_writable(directory)
        return cls(directory, seconds, log, shard)

    def for_run(self, run: int, log: Callable[[str], None]) -> "ServerCheckpoint":
        """Return the checkpoint of a run, with a file of its own."""
        directory = str(self.path.parent)
        return ServerCheckpoint(
            directory, self._seconds, log, self._shard, self._now, run
        )

    def restore(self, service: Service) -> None:
        """Let a service resume from the file, if there is one."""
        self._remove_unfinished()
        if not self.path.exists():
            return
        try:
            with open(self.path, "rb") as file, np.load(file) as content:
                restored = RestoredModel(
                    self.path,
                    json.loads(content["handed"].tobytes()),
                    content["words"],
                    int(content["clock"]),
                    float(content["rate"]),
                )
        except _READ_ERRORS as error:
            raise RuntimeError(
                f"tf_dgc: the server cannot resume from {self.path}: {error}. Remove "
                "the file to start anew."
            ) from error
        service.restore(restored)
        self._log(f"resumes from {self.path}, at update {restored.clock}")

    def _remove_unfinished(self) -> None:
        with contextlib.suppress(OSError):
            for path in unfinished(self.path):
                path.unlink(missing_ok=True)

    def write_if_due(self, service: Service) -> None:
        """Write the file if a new period has begun and the model has changed."""
        if service.model is None:
            return
        period = int(self._now() // self._seconds)
        if self._last_period not in (None, period):
            clock = service.model.clock
            if self._saved_clock != clock and self._write(service, service.model):
                self._saved_clock = clock
        self._last_period = period

    def end(self, service: Service) -> None:
        """Remove the file if all workers left in order; else write it, if alone."""
        if service.is_finished:
            self._remove()
        elif self._shard[1] == 1 and service.model is not None:
            self._write(service, service.model)

    def _remove(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self._log(
                f"cannot remove {self.path}, although training is complete: {error}"
            )

    def _write(self, service: Service, model: ServerModel) -> bool:
        spec = np.frombuffer(json.dumps(service.spec).encode(), np.uint8)
        try:
            with replacing(self.path) as path, open(path, "wb") as file:
                np.savez(
                    file,
                    handed=spec,
                    words=model.state(),
                    clock=np.int64(model.clock),
                    rate=np.float64(model.learning_rate),
                )
        except OSError as error:
            self._log(f"cannot write {self.path} at update {model.clock}: {error}")
            return False
        return True


def _check_writable(directory: str) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise RuntimeError(
            f"tf_dgc: the server cannot write its checkpoints to {directory!r}, the "
            f"environment variable {DIRECTORY_VARIABLE}: {error}"
        ) from error
