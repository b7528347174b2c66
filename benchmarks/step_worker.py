"""One worker of the step benchmark, which `step.py` starts and tells what to do.

    python step_worker.py SETTINGS

SETTINGS are JSON. Every line of standard input is a request, and is answered by one
line on standard output; waiting for a request takes no processor time.
"""

import faulthandler
import json
import sys
import time

import breakdown
import keras
import models
import tensorflow as tf
from absl import logging
from replies import reply, take_standard_output

import tf_dgc

WARMUP_STEPS = 3


def main(settings):
    """Build model, optimizer and step; then do what the parent asks for."""
    faulthandler.enable()
    replies = take_standard_output()
    logging.set_verbosity(logging.WARNING)
    tf.config.threading.set_intra_op_parallelism_threads(settings["threads"])
    step, gradients, model = make_step(settings)
    for _ in range(WARMUP_STEPS):
        step()
        gradients()
    reply(
        replies,
        variables=len(model.trainable_variables),
        parameters=model.count_params(),
    )
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "steps":
            cpu = time.process_time()
            times = [_timed(step) for _ in range(request["count"])]
            reply(replies, times=times, cpu=1000 * (time.process_time() - cpu))
        else:
            parts = breakdown.measure(
                step, gradients, request["count"], settings["rank"]
            )
            reply(replies, **parts)


def make_step(settings):
    """Return a function that does one step, one for its gradients only, and the model.

    Both functions return after all work is done, with the loss.
    """
    strategy = _strategy(settings)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.MODELS[settings["model"]]()
        optimizer = _optimizer(settings)
        optimizer.build(model.trainable_variables)
    variables = model.trainable_variables
    batch = [tf.constant(a) for a in models.data(model, seed=settings["rank"])]
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def compute(x, y):
        with tf.GradientTape() as tape:
            # Gradients of all workers are summed.
            loss = loss_of(y, model(x, training=True)) / strategy.num_replicas_in_sync
        return loss, tape.gradient(loss, variables)

    def train(x, y):
        loss, gradients = compute(x, y)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return (loss,)

    # Gradients are returned: TensorFlow does not compute what nobody uses.
    def compute_only(x, y):
        loss, gradients = compute(x, y)
        return loss, *gradients

    def runner(function):
        in_graph = tf.function(lambda *args: strategy.run(function, args=args))

        def run():
            loss = in_graph(*batch)[0]
            return strategy.experimental_local_results(loss)[0].numpy()

        return run

    return runner(train), runner(compute_only), model


def _strategy(settings):
    if settings["mode"] == "none":
        return tf.distribute.get_strategy()
    return tf_dgc.prepare(tf.distribute.MultiWorkerMirroredStrategy())


def _optimizer(settings):
    sgd = keras.optimizers.SGD(0.01, momentum=0.9)
    if settings["mode"] in {"none", "dense"}:
        return sgd
    return tf_dgc.DGCOptimizer(sgd, sparsity=0.999, **settings["options"])


def _timed(step):
    start = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
