"""Worker process of `step.py`.

    PYTHONPATH=benchmarks python benchmarks/workers/step_worker.py SETTINGS

SETTINGS are JSON. Every line of standard input is a request, answered by one line on
standard output; waiting for a request takes no processor time.
"""

import contextlib
import faulthandler
import itertools
import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from common import algorithms, breakdown, method_settings, models, peers
from common.replies import answer, reply, take_standard_output

import tf_dgc
from tf_dgc._internals import tracing
from tf_dgc.steps import implementations, top_k_step

WARMUP_STEPS = 3


def main(settings):
    """Build model, optimizer and step, and answer the requests of the benchmark."""
    faulthandler.enable()
    replies = take_standard_output()
    logging.set_verbosity(logging.WARNING)
    tf.config.threading.set_intra_op_parallelism_threads(settings["threads"])
    run_steps, gradients, model = create_steps(settings)
    _time_steps(run_steps, WARMUP_STEPS)
    for _ in range(WARMUP_STEPS):
        gradients()
    reply(
        replies,
        variables=len(model.trainable_variables),
        parameters=model.count_params(),
        onednn=tracing.uses_onednn(),
    )
    answer(
        replies,
        lambda count: _time_steps(run_steps, count),
        lambda count: breakdown.measure(run_steps, gradients, count, settings["rank"]),
    )


def create_steps(settings):
    """Return a function that takes steps, one for the gradients only, and the model.

    The first function has two parameters: the number of steps, and a function of a
    step's index that returns a context manager for the step. Each step waits for this
    worker's loss, after all work is done.
    """
    strategy = _strategy(settings)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.MODELS[settings["model"]]()
        optimizer = _optimizer(settings)
        optimizer.build(model.trainable_variables)
    variables = model.trainable_variables
    size = models.BATCH_SIZES.get(settings["model"], peers.BATCH_SIZE)
    arrays = models.data(model, settings["rank"], size)
    batch = [tf.constant(a) for a in arrays]
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def compute(x, y):
        with tf.GradientTape() as tape:
            # Keras divides it by the number of workers; gradients are summed.
            loss = loss_of(y, model(x, training=True))
        return loss, tape.gradient(loss, variables)

    def train(x, y):
        loss, gradients = compute(x, y)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return (loss,)

    # Returns the gradients, since TensorFlow does not compute unused values.
    def compute_only(x, y):
        loss, gradients = compute(x, y)
        return loss, *gradients

    def runner(function):
        @tf.function
        def run_on_all(*args):
            return strategy.run(function, args=args)

        def run():
            loss = run_on_all(*batch)[0]
            return strategy.experimental_local_results(loss)[0].numpy()

        return run

    gradients = runner(compute_only)
    if settings["loop"] == "fit":
        model.compile(optimizer, loss_of, metrics=["accuracy"])
        return _fit_steps(model, arrays, strategy), gradients, model
    return _custom_steps(runner(train)), gradients, model


def _custom_steps(step):
    def run_steps(count, context):
        for i in range(count):
            with context(i):
                step()

    return run_steps


def _fit_steps(model, arrays, strategy):
    """Return a function that takes the steps in one epoch of `model.fit`."""
    # Keras divides a batch among the workers.
    batch = tuple(np.concatenate([a] * strategy.num_replicas_in_sync) for a in arrays)

    def run_steps(count, context):
        data = tf.data.Dataset.from_tensors(batch).repeat(count)
        model.fit(data, verbose=0, callbacks=[StepContext(context)])

    return run_steps


class StepContext(keras.callbacks.Callback):
    """Enters a context for every step of `fit`; Keras then waits for its loss."""

    def __init__(self, context):
        super().__init__()
        self._context = context
        self._stack = contextlib.ExitStack()

    def on_train_batch_begin(self, batch, logs=None):
        """Enter the context."""
        self._stack.enter_context(self._context(batch))

    def on_train_batch_end(self, batch, logs=None):
        """Leave the context."""
        self._stack.close()


def _strategy(settings):
    if settings["mode"] == "none":
        return tf.distribute.get_strategy()
    return tf_dgc.prepare(tf.distribute.MultiWorkerMirroredStrategy())


def _optimizer(settings):
    mode = settings["mode"]
    momentum = 0.0 if mode in method_settings.NO_INNER_MOMENTUM else 0.9
    sgd = keras.optimizers.SGD(0.01, momentum=momentum)
    if mode in {"none", "dense"}:
        return sgd
    if mode in method_settings.MODES:
        wrap, _ = method_settings.create_method(method_settings.MODES[mode])
        collective = algorithms.overlapped("ring", settings["overlap"] or None)
        return wrap(sgd, method_settings.NO_PHASES, collective=collective)
    _, _, algorithm = mode.partition(" ")
    options = {**settings["options"], "collective": algorithm or "ring"}
    if mode == "dgc-engine":
        implementations.IMPLEMENTATIONS.remove(top_k_step.start_top_k_step)
    return tf_dgc.DGCOptimizer(sgd, **options)


def _time_steps(run_steps, count):
    """Return the times of steps in ms, each from the end of the previous step."""
    ends = [time.perf_counter()]

    @contextlib.contextmanager
    def timed(_):
        yield
        ends.append(time.perf_counter())

    run_steps(count, timed)
    return [1000 * (b - a) for a, b in itertools.pairwise(ends)]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
