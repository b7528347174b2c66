"""Worker process of `advice.py`.

    PYTHONPATH=benchmarks python benchmarks/workers/advice_worker.py SETTINGS

SETTINGS are JSON: `mode`, `model`, `threads`, `num_workers` and `rank`; with mode
"none" a worker is alone. Every line of standard input is a request, answered by one
line on standard output.
"""

import faulthandler
import gc
import json
import sys
import time

import keras
import tensorflow as tf
from absl import logging
from common import models, peers
from common.replies import reply, take_standard_output

import tf_dgc
from tf_dgc.advice import timing
from tf_dgc.optimizers import autotune


class Worker:
    """Times steps of a model with one method after the other.

    Args:
        settings: `mode`, `model`, `threads`, `num_workers` and `rank`.
    """

    def __init__(self, settings):
        self._settings = settings
        alone = settings["mode"] == "none"
        self._strategy = (
            tf.distribute.get_strategy() if alone else tf_dgc.multi_worker_strategy()
        )
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._trainer_key = None
        self._trainer = None

    def time(self, methods, seconds):
        """Return seconds and requests of steps, and the speeds of this machine."""
        num_workers, model = self._settings["num_workers"], self._model()
        inputs, _ = self._batch(model)
        candidates = timing.find_candidates(methods)
        timings, slowdown = timing.time_steps(
            model, inputs, _inner_optimizer(), candidates, seconds
        )
        timed = {
            t.candidate.name: {
                # Not corrected: the workers of a cluster share this machine.
                "seconds": slowdown * t.seconds,
                "requests": t.requests(num_workers),
                "merges": t.merges,
            }
            for t in timings
        }
        return {"timed": timed, "speeds": autotune.local_speeds()}

    def steps(self, method, auto, link, periods):
        """Take the steps of some periods; return milliseconds and bytes sent."""
        # "auto" chooses by the speed of the links: each link needs its own optimizer.
        step, optimizer = self._cached_trainer(method, auto, link if auto else "")
        times = []
        for _ in range(periods * _candidate(method).period):
            start = time.perf_counter()
            step().numpy()
            times.append(1000 * (time.perf_counter() - start))
        stats = getattr(optimizer, "stats", None)
        sent = stats.bytes_per_step if stats else None
        exchange = stats.collective if stats else "ring"
        return {"ms": times, "sent_bytes": sent, "exchange": exchange}

    def _cached_trainer(self, method, auto, link):
        key = method, auto, link
        if self._trainer_key != key:
            self._trainer = None
            gc.collect()  # memory suffices for one trainer only
            self._trainer = self._create_trainer(method, auto)
            self._trainer_key = key
        return self._trainer

    def _create_trainer(self, method, auto):
        """Return a function that takes a step, already traced, and the optimizer."""
        keras.utils.set_random_seed(0)
        with self._strategy.scope():
            model, optimizer = self._model(), _optimizer(method, auto)
            optimizer.build(model.trainable_variables)
        x, y = self._batch(model)
        variables = model.trainable_variables

        def train():
            with tf.GradientTape() as tape:
                # Keras divides it by the number of workers; gradients are summed.
                loss = self._loss(y, model(x, training=True))
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        step = tf.function(lambda: self._strategy.run(train))

        def run():
            return self._strategy.experimental_local_results(step())[0]

        for _ in range(3):
            run().numpy()
        return run, optimizer

    def _model(self):
        return models.MODELS[self._settings["model"]]()

    def _batch(self, model):
        size = models.BATCH_SIZES.get(self._settings["model"], peers.BATCH_SIZE)
        arrays = models.data(model, self._settings["rank"], size)
        return [tf.constant(a) for a in arrays]


def _inner_optimizer():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _candidate(method):
    (candidate,) = (c for c in timing.find_candidates([method]) if c.name == method)
    return candidate


def _optimizer(method, auto):
    """Return the optimizer that the advice's line of code creates."""
    code = _candidate(method).code
    if auto:
        code = f'{code[:-1]}, collective="auto")'
    return eval(code, {"tf_dgc": tf_dgc, "optimizer": _inner_optimizer()})


def main(settings):
    """Answer the requests of the benchmark."""
    faulthandler.enable()
    replies = take_standard_output()
    logging.set_verbosity(logging.WARNING)
    tf.config.threading.set_intra_op_parallelism_threads(settings["threads"])
    worker = Worker(settings)
    reply(replies, ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply(replies, **getattr(worker, request.pop("do"))(**request))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
