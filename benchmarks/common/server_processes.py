"""Processes of a benchmark with a parameter server: the server, and slow workers.

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

WARM = 3


class Server:
    """The server, in threads of its own.

    Args:
        task: task of this process.
    """

    def __init__(self, task):
        self._transport = rpc.Server(task.server, 2 * task.num_workers)
        say = {"log": lambda line: print(line, flush=True)}
        limits = Limits.from_environment()
        self._loop = ServerLoop(self._transport, task.num_workers, limits, **say)
        self._service = self._loop.runs.service(0)
        self._serves = threading.Thread(target=self._loop.run, daemon=True)
        self._serves.start()
        threading.Thread(target=self._wake, daemon=True).start()

    def _wake(self):
        while True:
            time.sleep(0.2)
            self._transport.wake()

    @property
    def model(self):
        """What is served; None before the first worker has handed it over."""
        return self._service.model

    def answer(self, request):
        """Return what has been done so far."""
        del request
        service = self._service
        if not (self._serves.is_alive() or service.is_finished):
            raise RuntimeError("the server has ended, by what stands above")
        model = service.model
        if model is None:
            return {}
        ages = {str(age): number for age, number in model.ages.items()}
        return {"updates": model.clock, "ages": ages, "late": service.pushes.num_late}


class Worker:
    """A worker, which sleeps so that a step takes as long as on a machine of its own.

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
        own = settings["step_ms"] / settings["speeds"][settings["rank"]]
        self._own = own / 1000
        self._gradients = tf.function(self._on_all(self._compute))
        self._apply = tf.function(self._on_all(self._update))

    def _on_all(self, function):
        def run(*given):
            found = self._strategy.run(function, args=given)
            return self._strategy.experimental_local_results(found)[0]

        return run

    def _compute(self, inputs, classes):
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            # Under a strategy Keras divides it by the number of workers.
            loss = loss_of(classes, self.model(inputs, training=True))
        return tape.gradient(loss, self.model.trainable_variables)

    def _update(self, *gradients):
        # What a function is given has no device, by which Keras asks for a sum.
        gradients = [tf.identity(g) for g in gradients]
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return tf.identity(self.optimizer.iterations)

    def answer(self, request):
        """Do what is asked for."""
        if request["do"] == "warm":
            return self._warm()
        if request["do"] == "run":
            return self.run(request["seconds"], request["count"])
        return {}

    def _warm(self):
        computing = [self._computing() for _ in range(2 * WARM)]
        times = []
        while len(times) < WARM and not self._is_behind():
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        return {
            "step": statistics.median(times[1:] or times),
            "computing": statistics.median(computing[WARM:]),
            "onednn": tracing.uses_onednn(),
            "parameters": self.model.count_params(),
        }

    def _computing(self):
        batch, start = self._draw(), time.perf_counter()
        self._gradients(*batch)[0].numpy()
        return time.perf_counter() - start

    def _is_behind(self):
        """Whether others have taken all first steps, and would not come to another."""
        backup = getattr(self.optimizer, "mode", None) == "backup"
        return backup and int(self.optimizer.iterations) >= WARM

    def step(self):
        """Take a step: compute, sleep for what is missing, exchange and update."""
        batch, start = self._draw(), time.perf_counter()
        gradients = self._gradients(*batch)
        gradients[0].numpy()
        time.sleep(max(0.0, start + self._own - time.perf_counter()))
        return int(self._apply(*gradients))

    def run(self, seconds, count, updates=None, behind=lambda seconds, updates: None):
        """Take steps, and then no part any longer; return what each took.

        Args:
            seconds: after which no step begins.
            count: of the steps at most.
            updates: of the optimizer, of whatever workers, after which none begins.
            behind: called after each step, with the seconds since the first one, and
                the updates.
        """
        start, times, done = time.perf_counter(), [], 0
        now = start
        while len(times) < count and now - start < seconds:
            if updates is not None and done >= updates:
                break
            done, before = self.step(), now
            now = time.perf_counter()
            times.append(now - before)
            behind(now - start, done)
        if self._served:
            self.optimizer.leave()
        return {"times": times, "seconds": time.perf_counter() - start}


def optimizer(inner, settings):
    """Return a `ServerOptimizer`.

    Args:
        inner: optimizer whose rule the server is to run.
        settings: its mode, `sparsity` of pushes, what is pulled, and the numbers that
            modes have.
    """
    numbers = {"ssp": {"staleness": settings["staleness"]}}
    numbers["backup"] = {"quorum": settings["quorum"]}
    return tf_dgc.ServerOptimizer(
        inner,
        settings["mode"],
        compressor=tf_dgc.compressors.TopK(settings["sparsity"]),
        corrections=tf_dgc.Corrections(factor_masking=settings.get("factor_masking")),
        pull=settings["pull"],
        pull_sparsity=settings.get("pull_sparsity"),
        **numbers.get(settings["mode"], {}),
    )


def serve(make_server, make_worker):
    """Be what this process's task says, and do what the parent asks for.

    Args:
        make_server: called with the task, if it is the server.
        make_worker: called without arguments otherwise.
    """
    faulthandler.enable()
    replies = take_standard_output()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    task = tasks.find_task() if tasks.is_cluster() else None
    serves = task is not None and task.worker is None
    does = make_server(task) if serves else make_worker()
    reply(replies, ready=True)
    for line in sys.stdin:
        reply(replies, **does.answer(json.loads(line)))
