"""Processes of a benchmark with a parameter server: the server and its workers.

Every line of standard input is a JSON object, answered by one on standard output.
"""

import faulthandler
import json
import statistics
import sys
import threading
import time

import keras
import tensorflow as tf

import tf_dgc
from common.replies import reply, take_standard_output
from common.server_runs import SERVED
from tf_dgc._internals import rpc, tracing
from tf_dgc.server import tasks
from tf_dgc.server.process import ServerLoop
from tf_dgc.server.sessions import Limits

WARMUP_STEPS = 3


class Server:
    """The server, which runs in its own threads.

    Args:
        task: task of this process.
    """

    def __init__(self, task):
        self._transport = rpc.Server(task.server, 2 * task.num_workers)
        self._loop = ServerLoop(
            self._transport, task.num_workers, Limits.from_environment(), log=_log
        )
        self._service = self._loop.runs.service(0)
        self._loop_thread = threading.Thread(target=self._loop.run, daemon=True)
        self._loop_thread.start()
        threading.Thread(target=self._wake, daemon=True).start()

    def _wake(self):
        while True:
            time.sleep(0.2)
            self._transport.wake()

    @property
    def model(self):
        """The model; None before the first worker has sent it."""
        return self._service.model

    def answer(self, request):
        """Return the counts of updates, ages of pushes and late pushes."""
        del request
        service = self._service
        if not (self._loop_thread.is_alive() or service.is_finished):
            raise RuntimeError("the server has ended; see its log above")
        model = service.model
        if model is None:
            return {}
        ages = {str(age): count for age, count in model.ages.items()}
        return {"updates": model.clock, "ages": ages, "late": service.pushes.num_late}


def _log(line):
    print(line, flush=True)


class Worker:
    """A worker that sleeps until a step has taken as long as on its own machine.

    Args:
        settings: settings of the mode: `mode`, `rank`, `speeds`, `step_ms`, and those
            of `make_optimizer`.
        make_model: function that returns the model.
        make_optimizer: function of the settings that returns its optimizer.
        draw: function of the model that returns a function which draws the inputs and
            classes of a step.

    Attributes:
        model: the model.
        optimizer: its optimizer.
    """

    def __init__(self, settings, make_model, make_optimizer, draw):
        self._served = settings["mode"] in SERVED
        self._strategy = tf.distribute.get_strategy()
        if not self._served:
            self._strategy = tf_dgc.prepare(tf_dgc.multi_worker_strategy())
        keras.utils.set_random_seed(settings.get("seed", 0))
        with self._strategy.scope():
            self.model = make_model()
            self.optimizer = make_optimizer(settings)
            self.optimizer.build(self.model.trainable_variables)
        self._draw = draw(self.model)
        step_ms = settings["step_ms"] / settings["speeds"][settings["rank"]]
        self._step_seconds = step_ms / 1000
        self._gradients = tf.function(self._on_all_workers(self._compute))
        self._apply = tf.function(self._on_all_workers(self._update))

    def _on_all_workers(self, function):
        def run(*arguments):
            result = self._strategy.run(function, args=arguments)
            return self._strategy.experimental_local_results(result)[0]

        return run

    def _compute(self, inputs, classes):
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            # Under a strategy Keras divides it by the number of workers.
            loss = loss_of(classes, self.model(inputs, training=True))
        return tape.gradient(loss, self.model.trainable_variables)

    def _update(self, *gradients):
        # Arguments of a function have no device, which Keras needs for the sum.
        gradients = [tf.identity(g) for g in gradients]
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return tf.identity(self.optimizer.iterations)

    def answer(self, request):
        """Answer a request."""
        if request["do"] == "warm":
            return self._warm_up()
        if request["do"] == "run":
            return self.run(request["seconds"], request["count"])
        return {}

    def _warm_up(self):
        computing = [self._time_gradients() for _ in range(2 * WARMUP_STEPS)]
        times = []
        while len(times) < WARMUP_STEPS and not self._others_are_warm():
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        return {
            "step": statistics.median(times[1:] or times),
            "computing": statistics.median(computing[WARMUP_STEPS:]),
            "onednn": tracing.uses_onednn(),
            "parameters": self.model.count_params(),
        }

    def _time_gradients(self):
        batch, start = self._draw(), time.perf_counter()
        self._gradients(*batch)[0].numpy()
        return time.perf_counter() - start

    def _others_are_warm(self):
        """Whether in mode "backup" a quorum of others has taken all warm-up steps."""
        backup = getattr(self.optimizer, "mode", None) == "backup"
        return backup and int(self.optimizer.iterations) >= WARMUP_STEPS

    def step(self):
        """Take a step: compute, sleep for the remaining time, exchange and update."""
        batch, start = self._draw(), time.perf_counter()
        gradients = self._gradients(*batch)
        gradients[0].numpy()
        time.sleep(max(0.0, start + self._step_seconds - time.perf_counter()))
        return int(self._apply(*gradients))

    def run(self, seconds, count, updates=None, after_step=None):
        """Take steps, then leave the server; return the seconds of each and of all.

        Args:
            seconds: seconds after which no step begins.
            count: largest number of steps.
            updates: updates by any worker after which no step begins.
            after_step: function called after each step with the seconds since the
                beginning and the number of updates.
        """
        start, times, num_updates = time.perf_counter(), [], 0
        now = start
        while len(times) < count and now - start < seconds:
            if updates is not None and num_updates >= updates:
                break
            before = now
            num_updates = self.step()
            now = time.perf_counter()
            times.append(now - before)
            if after_step is not None:
                after_step(now - start, num_updates)
        if self._served:
            self.optimizer.leave()
        return {"times": times, "seconds": time.perf_counter() - start}


def create_optimizer(inner, settings):
    """Return a `ServerOptimizer`.

    Args:
        inner: optimizer whose rule the server runs.
        settings: `mode`, `sparsity` of pushes, `pull`, `pull_sparsity`, `staleness` and
            `quorum`.
    """
    mode_arguments = {
        "ssp": {"staleness": settings["staleness"]},
        "backup": {"quorum": settings["quorum"]},
    }
    return tf_dgc.ServerOptimizer(
        inner,
        settings["mode"],
        compressor=tf_dgc.compressors.TopK(settings["sparsity"]),
        corrections=tf_dgc.Corrections(factor_masking=settings.get("factor_masking")),
        pull=settings["pull"],
        pull_sparsity=settings.get("pull_sparsity"),
        **mode_arguments.get(settings["mode"], {}),
    )


def serve(make_server, make_worker):
    """Run the server or a worker, as `TF_CONFIG` says, and answer requests.

    Args:
        make_server: function of the task that returns a `Server`.
        make_worker: function that returns a `Worker`.
    """
    faulthandler.enable()
    replies = take_standard_output()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    task = tasks.find_task() if tasks.is_cluster() else None
    is_server = task is not None and task.worker is None
    process = make_server(task) if is_server else make_worker()
    reply(replies, ready=True)
    for line in sys.stdin:
        reply(replies, **process.answer(json.loads(line)))
