"""One worker of `server.py`, or its server, which is started and told what to do.

    PYTHONPATH=benchmarks python benchmarks/workers/server_worker.py SETTINGS

Every line of standard input is a JSON object, answered by one on standard output.
"warm" takes some steps, with what a step computes measured; "run" takes steps for so
many seconds, or so many in all where workers wait for each other by collectives, and
then leaves; "read" is answered by what the server has done.
"""

import faulthandler
import json
import statistics
import sys
import threading
import time

import keras
import tensorflow as tf
from common import models
from common.replies import reply, take_standard_output

import tf_dgc
from tf_dgc._internals import rpc, tracing
from tf_dgc.server import tasks
from tf_dgc.server.loop import Loop
from tf_dgc.server.members import Limits

WARM = 3


class Server:
    """The server, in threads of its own.

    Args:
        task: task of this process.
    """

    def __init__(self, task):
        self._transport = rpc.Server(task.server, 2 * task.num_workers)
        say = {"say": lambda line: print(line, flush=True)}
        limits = Limits.of_environment()
        self._loop = Loop(self._transport, task.num_workers, limits, **say)
        self._serves = threading.Thread(target=self._loop.run, daemon=True)
        self._serves.start()
        threading.Thread(target=self._wake, daemon=True).start()

    def _wake(self):
        while True:
            time.sleep(0.2)
            self._transport.wake()

    def answer(self, request):
        """Return what has been done so far."""
        del request
        service = self._loop.service
        if not (self._serves.is_alive() or service.is_done):
            raise RuntimeError("the server has ended, by what stands above")
        model = service.model
        if model is None:
            return {}
        ages = {str(age): number for age, number in model.ages.items()}
        return {"updates": model.clock, "ages": ages, "late": service.pushes.late}


class Worker:
    """A worker, which sleeps so that a step takes as long as on a machine of its own.

    Args:
        settings: settings of the mode.
    """

    def __init__(self, settings):
        self._settings = settings
        self._strategy = tf.distribute.get_strategy()
        if settings["mode"] == "mirrored":
            self._strategy = tf_dgc.prepare(tf_dgc.multi_worker_strategy())
        keras.utils.set_random_seed(0)
        with self._strategy.scope():
            self._model = models.MODELS[settings["model"]]()
            self._optimizer = self._make_optimizer()
            self._optimizer.build(self._model.trainable_variables)
        arrays = models.data(self._model, settings["rank"], settings["batch_size"])
        self._batch = [tf.constant(a) for a in arrays]
        self._gradients = tf.function(lambda: self._run(self._compute))
        self._step = tf.function(lambda: self._run(self._train))
        self._slept = 0.0

    def _make_optimizer(self):
        sgd = keras.optimizers.SGD(0.01, momentum=0.9)
        sparsity, mode = self._settings["sparsity"], self._settings["mode"]
        if mode == "mirrored":
            return tf_dgc.DGCOptimizer(sgd, sparsity)
        settings = {"ssp": {"staleness": self._settings["staleness"]}}
        settings["backup"] = {"quorum": self._settings["quorum"]}
        return tf_dgc.ServerOptimizer(
            sgd,
            mode,
            compressor=tf_dgc.compressors.TopK(sparsity),
            pull=self._settings["pull"],
            **settings.get(mode, {}),
        )

    def _run(self, function):
        found = self._strategy.run(function)
        return self._strategy.experimental_local_results(found)[0]

    def _compute(self):
        variables = self._model.trainable_variables
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        x, y = self._batch
        with tf.GradientTape() as tape:
            loss = loss_of(y, self._model(x, training=True))
        return tape.gradient(loss, variables)

    def _train(self):
        gradients = self._compute()
        if self._settings["mode"] == "mirrored":  # sums, not means
            number = self._strategy.num_replicas_in_sync
            gradients = [g / number for g in gradients]
        variables = self._model.trainable_variables
        self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return tf.identity(self._optimizer.iterations)

    def answer(self, request):
        """Do what is asked for."""
        if request["do"] == "warm":
            return self._warm()
        if request["do"] == "run":
            return self._take_steps(request["seconds"], request["count"])
        return {}

    def _warm(self):
        for _ in range(WARM):
            self._gradients()
        computing = statistics.median(_seconds(self._gradients) for _ in range(WARM))
        own = (
            self._settings["step_ms"]
            / 1000
            / self._settings["speeds"][self._settings["rank"]]
        )
        self._slept = max(0.0, own - computing)
        times = []
        while len(times) < WARM and not self._is_behind():
            times.append(_seconds(self._whole_step))
        return {
            "step": statistics.median(times[1:] or times),
            "computing": computing,
            "onednn": tracing.uses_onednn(),
            "parameters": self._model.count_params(),
        }

    def _is_behind(self):
        """Whether others have taken all first steps, and would not come to another."""
        backup = self._settings["mode"] == "backup"
        return backup and int(self._optimizer.iterations) >= WARM

    def _whole_step(self):
        time.sleep(self._slept)
        return self._step()

    def _take_steps(self, seconds, count):
        start, times = time.perf_counter(), []
        while len(times) < count and time.perf_counter() - start < seconds:
            times.append(_seconds(self._whole_step))
        if self._settings["mode"] != "mirrored":
            self._optimizer.leave()
        return {"times": times, "seconds": time.perf_counter() - start}


def _seconds(function):
    start = time.perf_counter()
    tf.nest.map_structure(lambda t: t.numpy(), function())
    return time.perf_counter() - start


def main(settings):
    """Do what the parent asks for."""
    faulthandler.enable()
    replies = take_standard_output()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    task = tasks.find() if tasks.is_cluster() else None
    serves = task is not None and task.worker is None
    does = Server(task) if serves else Worker(settings)
    reply(replies, ready=True)
    for line in sys.stdin:
        reply(replies, **does.answer(json.loads(line)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
