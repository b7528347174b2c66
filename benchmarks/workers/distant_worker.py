"""Worker process of `distant.py`.

    PYTHONPATH=benchmarks python benchmarks/workers/distant_worker.py SETTINGS

SETTINGS are JSON. Every line of standard input requests steps, and is answered by one
line on standard output.
"""

import faulthandler
import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from common import models, peers, presets
from common.replies import reply, take_standard_output

import tf_dgc
from tf_dgc._internals import tracing


class Worker:
    """Trains a model on one batch, in steps of a given length.

    Args:
        settings: `mode`, `model`, `period`, `threads` and `rank`.

    Attributes:
        model: the model.
    """

    def __init__(self, settings):
        alone = settings["mode"] == "none"
        self._strategy = (
            tf.distribute.get_strategy() if alone else tf_dgc.multi_worker_strategy()
        )
        keras.utils.set_random_seed(0)
        with self._strategy.scope():
            self.model = models.MODELS[settings["model"]]()
            self._optimizer = presets.create_optimizer(
                settings["mode"], settings["period"]
            )
            self._optimizer.build(self.model.trainable_variables)
        size = models.BATCH_SIZES.get(settings["model"], peers.BATCH_SIZE)
        arrays = models.data(self.model, settings["rank"], size)
        self._batch = [tf.constant(a) for a in arrays]
        self._period = settings["period"]
        self._exchanges = not alone
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._update_seconds = 0.0
        self._gradients = tf.function(lambda: self._strategy.run(self._on_worker))
        self._apply = tf.function(self._on_all)

    def steps(self, count, seconds=0.0):
        """Take steps, starting at the beginning of a round.

        Args:
            count: number of steps.
            seconds: least duration of a step without an exchange; a shorter one sleeps
                before the update.

        Returns:
            `alone` and `exchanging`, the seconds of steps without and with an exchange;
            and where the optimizer counts them, `sent`, bytes that a worker handed over
            in an exchange, and `left_out`, how often a worker took no part in one.
        """
        alone, exchanging = [], []
        for i in range(count):
            is_last = self._exchanges and (i + 1) % self._period == 0
            start = time.perf_counter()
            gradients = self._gradients()
            wait = start + seconds - self._update_seconds - time.perf_counter()
            time.sleep(max(0.0, wait))
            before = time.perf_counter()
            self._apply(gradients).numpy()
            now = time.perf_counter()
            if is_last:
                exchanging.append(now - start)
                continue
            alone.append(now - start)
            shortest = self._update_seconds or now - before
            self._update_seconds = min(shortest, now - before)
        return {"alone": alone, "exchanging": exchanging, **self._counts()}

    def digest(self):
        """Return sums of the weights, equal on all workers after an exchange."""
        return [float(np.sum(w, dtype=np.float64)) for w in self.model.get_weights()]

    def _counts(self):
        stats = getattr(self._optimizer, "stats", None)
        if stats is None:
            return {}
        return {"sent": stats.bytes_per_step, "left_out": stats.nonfinite}

    def _on_worker(self):
        x, y = self._batch
        with tf.GradientTape() as tape:
            # Keras divides it by the number of workers; gradients are summed.
            loss = self._loss(y, self.model(x, training=True))
        return tape.gradient(loss, self.model.trainable_variables)

    def _on_all(self, gradients):
        def apply(gradients):
            # Arguments of a function have no device, which Keras needs for the sum.
            gradients = [tf.identity(g) for g in gradients]
            variables = self.model.trainable_variables
            self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return tf.constant(0)

        result = self._strategy.run(apply, args=(gradients,))
        return self._strategy.experimental_local_results(result)[0]


def main(settings):
    """Build the model, take a round, and answer the requests of the benchmark."""
    faulthandler.enable()
    replies = take_standard_output()
    tf.config.threading.set_intra_op_parallelism_threads(settings["threads"])
    worker = Worker(settings)
    worker.steps(settings["period"])
    reply(
        replies,
        parameters=worker.model.count_params(),
        onednn=tracing.uses_onednn(),
    )
    for line in sys.stdin:
        request = json.loads(line)
        del request["do"]
        steps = worker.steps(**request)
        reply(replies, **steps, digest=worker.digest())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
