"""One worker of `advice.py`, which starts it and tells it what to do.

    PYTHONPATH=benchmarks python benchmarks/workers/advice_worker.py SETTINGS

SETTINGS are JSON: `mode`, `model`, `threads` and `rank`; with mode "none" a worker is
alone. Every line of standard input asks for something, and is answered by one line.
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
    """A model, or one for each way to train it.

    Args:
        settings: `mode`, `model`, `threads` and `rank`.
    """

    def __init__(self, settings):
        self._settings = settings
        alone = settings["mode"] == "none"
        self._strategy = (
            tf.distribute.get_strategy() if alone else tf_dgc.multi_worker_strategy()
        )
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._made = None, None

    def time(self, methods, seconds):
        """Return what the advice times: steps, what they ask for, and speeds."""
        number, model = self._settings["number"], self._model()
        (inputs, _), some = self._batch(model), timing.find_candidates(methods)
        found = timing.time_steps(model, inputs, _inner(), some, seconds)
        timed = {
            t.candidate.name: {
                "seconds": t.seconds,
                "asked": t.requests(number),
                "merges": t.merges,
            }
            for t in found
        }
        return {"timed": timed, "speeds": autotune.local_speeds()}

    def steps(self, method, auto, link, periods):
        """Take steps, of whole periods; return milliseconds, and what was sent."""
        (candidate,) = (c for c in timing.find_candidates([method]) if c.name == method)
        # "auto" chooses by the links that there are, so that each has its own.
        step, optimizer = self._trainer((method, auto, link if auto else ""))
        times = []
        for _ in range(periods * candidate.period):
            start = time.perf_counter()
            step().numpy()
            times.append(1000 * (time.perf_counter() - start))
        stats = getattr(optimizer, "stats", None)
        sent = stats.bytes_per_step if stats else None
        exchange = stats.collective if stats else "ring"
        return {"ms": times, "sent_bytes": sent, "exchange": exchange}

    def _trainer(self, key):
        if self._made[0] != key:
            self._made = None, None
            gc.collect()  # or all that were made before stay in memory
            self._made = key, self._make(*key[:2])
        return self._made[1]

    def _make(self, method, auto):
        """Return a function that takes a step, after a few, and the optimizer."""
        keras.utils.set_random_seed(0)
        with self._strategy.scope():
            model, optimizer = self._model(), _optimizer(method, auto)
            optimizer.build(model.trainable_variables)
        x, y = self._batch(model)
        variables = model.trainable_variables

        def train():
            with tf.GradientTape() as tape:
                # Keras divides it by the number of workers, and gradients are summed.
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


def _inner():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _optimizer(method, auto):
    """Return the optimizer of a way to train, by what the advice says to write."""
    (candidate,) = (c for c in timing.find_candidates([method]) if c.name == method)
    code = f'{candidate.code[:-1]}, collective="auto")' if auto else candidate.code
    return eval(code, {"tf_dgc": tf_dgc, "optimizer": _inner()})


def main(settings):
    """Do what the parent asks for."""
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
