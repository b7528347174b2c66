"""Links: what a worker has to do with one of the servers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc.choice import add_up
from tf_dgc.inner.taken import TakeOver
from tf_dgc.optimizers import inputs
from tf_dgc.optimizers.inputs import Place
from tf_dgc.server import handing, pulls, rows
from tf_dgc.server.connection import Connection
from tf_dgc.server.messages import Kind, Status
from tf_dgc.server.tasks import Task
from tf_dgc.steps import pushing
from tf_dgc.steps.accumulation import Gradient
from tf_dgc.steps.memory import Memory
from tf_dgc.transforms.clipping import Scale


class Pushed(NamedTuple):
    """What goes to a server in a step.

    Attributes:
        words: message, int32 `[w]`.
        step: outcome of the step of variables that are no tables; None without any.
        row_entries: number of entries of rows, an int or a scalar int64 tensor.
    """

    words: tf.Tensor
    step: pushing.Pushed | None
    row_entries: int | tf.Tensor


class Reply(NamedTuple):
    """What a server says to a push.

    Attributes:
        status: status, scalar int32.
        clock: server's clock, scalar int64.
        words: weights, int32 `[w]`.
    """

    status: tf.Tensor
    clock: tf.Tensor
    words: tf.Tensor


class Link:
    """What a worker has to do with one server.

    Args:
        optimizer: `ServerOptimizer` whose link it is.
        shard: index of the server, and number of servers.
        variables: variables that the server keeps.
        tabular: whether each is a table, of which rows travel.
        memory: variables of what this worker remembers of those that are none.
    """

    def __init__(
        self,
        optimizer: Any,
        shard: tuple[int, int],
        variables: Sequence[keras.Variable],
        tabular: Sequence[bool],
        memory: Memory,
    ):
        self._optimizer, self._shard = optimizer, shard
        self._variables, self._tabular, self._memory = variables, tabular, memory
        self._plain, self._tables = split(variables, tabular)
        self._forms = list(map(rows.table_of, self._tables))
        self._connection: Connection | None = None
        self._run = 0
        self._sparse: pulls.Form | None = None
        if optimizer.pull == "sparse" and self._plain:
            by = optimizer.compressor, optimizer.num_workers, optimizer.pull_sparsity
            self._sparse = pulls.form_of(memory.tensors, *by)

    @property
    def name(self) -> str:
        """Name of the server, for errors."""
        return f"server {self._shard[0]}"

    # --- outside of steps -----------------------------------------------------------

    def connect(self, task: Task, run: int) -> None:
        """Find the server.

        Args:
            task: task of this process, a worker.
            run: number of the run that this is to be.

        Raises:
            RuntimeError: as `Connection`.
        """
        self._connection, self._run = Connection(task.at(self._shard[0])), run

    @property
    def connection(self) -> Connection:
        """Connection to the server, behind `connect`."""
        assert self._connection is not None
        return self._connection

    def enter(self) -> tuple[bool, int]:
        """Do what `Connection.enter` does."""
        return self.connection.enter(self._handed(), self._steps())

    def give(self) -> None:
        """Do what `Connection.give` does."""
        self.connection.give(self._variables)

    def start(self) -> bool:
        """Do what `Connection.start` does."""
        return self.connection.start(self._variables)

    def leave(self) -> None:
        """Take part no longer, if this one did."""
        if self._connection is not None:
            self._connection.leave()

    def pull(self) -> None:
        """Take the server's weights as they are now.

        Raises:
            tf.errors.OpError: if the server does not respond.
        """
        _, clock, words = self.connection.ask(Kind.PULL)
        pulls.assign(self._variables, words)
        self.connection.clock.assign(clock)

    @property
    def bytes_per_pull(self) -> int:
        """Bytes of weights that come in a step, of variables that are no tables."""
        return 4 * self._plain_words

    @property
    def _plain_words(self) -> int:
        if self._sparse:
            return self._sparse.num_words
        return pulls.num_words(self._plain)

    def _steps(self) -> int:
        """Return the steps of this worker, also while the trace of the first is made.

        A variable that is created there has no value before it has run.
        """
        with tf.init_scope():
            counters = self._memory.counters.numpy()
        return int(counters[0]) if counters.size else 0

    def _handed(self) -> handing.Handed:
        """Return what the server is to be."""
        optimizer, exempt = self._optimizer, iter(self._memory.tensors)
        settings = {
            "mode": optimizer.mode,
            "staleness": optimizer.staleness,
            "quorum": optimizer.quorum,
            "correction": optimizer.correction,
            "correction_strength": optimizer.correction_strength,
            "error_feedback": bool(self._memory.residual),
            "seed": self._seed,
            "pull": optimizer.pull,
            "pull_sparsity": optimizer.pull_sparsity,
        }
        return handing.collect(
            settings,
            optimizer.num_workers,
            optimizer.inner_optimizer,
            optimizer.compressor,
            self._variables,
            [is_table or next(exempt).exempt for is_table in self._tabular],
            self._tabular,
            self._shard,
            self._run,
        )

    @property
    def _seed(self) -> int:
        """Seed of this server's part of the step, which draws by itself."""
        return self._optimizer.seed + self._shard[0]

    # --- within a step --------------------------------------------------------------

    def push(
        self,
        gradients: Sequence[Gradient],
        scales: Sequence[Scale],
        took: TakeOver,
        place: Place,
    ) -> Pushed:
        """Run the step of this server's variables, and return what goes to it.

        Args:
            gradients: gradient of each, as `clip` returns it.
            scales: factor of each; NaN for all, if one is not finite and there are
                tables, or several servers.
            took: settings of the inner optimizer that are applied in its place.
            place: place that the step runs at.
        """
        plain, of_tables = split(
            list(zip(gradients, scales, strict=True)), self._tabular
        )
        words, step, entries = [], None, 0
        if of_tables:
            given, by = zip(*of_tables, strict=True)
            words.append(rows.encode(self._forms, given, by))
            entries = add_up([tf.size(g.values, tf.int64) for g in given])
        if plain:
            own = [g for g, _ in plain], [s for _, s in plain]
            kept = range(len(plain)), took, self._memory, place
            made = inputs.put_together(self._optimizer, own, *kept)
            clock = tf.identity(self.connection.clock)
            step = pushing.push(made._replace(iteration=clock, seed=self._seed))
            words.append(step.words)
        return Pushed(tf.concat(words, axis=0), step, entries)

    def ask(self, pushed: Pushed, rate: tf.Tensor) -> Reply:
        """Push, and wait for what is pulled.

        Args:
            pushed: result of `push`.
            rate: learning rate, scalar float64, NaN for a schedule.
        """
        connection = self.connection
        return Reply(*connection.ask(Kind.PUSH, pushed.words, connection.clock, rate))

    def take(self, pushed: Pushed, reply: Reply) -> None:
        """Set the variables by what is pulled; keep a push that came too late."""
        if self._optimizer.mode == "backup":
            late = tf.equal(reply.status, int(Status.LATE))
            tf.cond(late, lambda: self._put_back(pushed), lambda: False)
        words = reply.words
        if self._tables:
            rows.take(self._forms, self._tables, words[self._plain_words :])
            words = words[: self._plain_words]
        if self._sparse:
            pulls.take(self._sparse, self._plain, words)
        elif self._plain:
            pulls.assign(self._plain, words)
        self.connection.clock.assign(reply.clock)

    def _put_back(self, pushed: Pushed) -> bool:
        """Keep what was pushed, which came too late."""
        assert pushed.step is not None  # as there are no tables with "backup"
        sent, _ = pushed.step.outcome.decode()
        kept = [r.local() for r in self._memory.residual]
        both = [
            k + tf.cast(tf.reshape(s, k.shape), k.dtype)
            for k, s in zip(kept, sent, strict=True)
        ]
        self._memory.store_residual(both)
        return True


def split(items: Sequence, tabular: Sequence[bool]) -> tuple[list, list]:
    """Return those of the variables that are no tables, and those of tables."""
    pairs = list(zip(items, tabular, strict=True))
    return [i for i, is_table in pairs if not is_table], [i for i, t in pairs if t]
