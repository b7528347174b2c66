"""Program of the workers of the fault matrix, started once per worker.

    python fault_worker.py FAULT

Trains for ever. The last worker is the victim; it causes those faults itself that a
signal from outside could not time, and prints "FAULT" just before.
"""

import json
import os
import signal
import sys
import threading
import time

import keras
import numpy as np

import tf_dgc
from tf_dgc.multiworker import cross_device, rendezvous, worker_variables

CONFIG = json.loads(os.environ["TF_CONFIG"])
RANK = CONFIG["task"]["index"]
VICTIM = int(os.environ.get("FAULT_VICTIM", len(CONFIG["cluster"]["worker"]) - 1))
FAULT = sys.argv[1] if RANK == VICTIM else "none"
EVERYWHERE = sys.argv[1]
FAULT_STEP = 10


def die():
    send_to_self(signal.SIGKILL)


def stop():
    send_to_self(signal.SIGSTOP)


def send_to_self(number):
    print("FAULT", flush=True)
    os.kill(os.getpid(), number)


class Steps(keras.callbacks.Callback):
    """Prints every step, and causes faults between steps."""

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        print("step", step, flush=True)
        if step == FAULT_STEP:
            self.fault()
        if EVERYWHERE in ("save", "stopped_save") and step == FAULT_STEP:
            self.model.save_weights(f"{sys.argv[2]}/{RANK}.weights.h5")
        if EVERYWHERE in ("below", "tracing") and step == FAULT_STEP + 5:
            self.model.stop_training = True

    def fault(self):
        if FAULT in ("below", "above"):
            print("FAULT", flush=True)
            time.sleep(float(os.environ["FAULT_SECONDS"]))
        if FAULT == "leave":
            print("FAULT", flush=True)
            sys.exit(0)
        if FAULT == "error":
            print("FAULT", flush=True)
            raise ValueError("the disk of this worker is full")
        if FAULT == "save":
            worker_variables.PerWorkerVariable.gather = lambda self: die()
        if FAULT == "stopped_save":
            worker_variables.PerWorkerVariable.gather = lambda self: stop()
        if FAULT == "collective":
            strategy = self.model.distribute_strategy
            count = cross_device.cross_device_ops(strategy).count
            threading.Thread(target=die_within_collective, args=[count]).start()


def die_within_collective(count):
    while True:
        if any(started > finished for started, finished in count().values()):
            die()


class SlowTracing(keras.Model):
    """Takes long to trace on the victim."""

    def train_step(self, *args, **kwargs):
        if FAULT == "tracing":
            print("FAULT", flush=True)
            time.sleep(float(os.environ["FAULT_SECONDS"]))
        return super().train_step(*args, **kwargs)


def make_optimizer():
    sgd = keras.optimizers.SGD(1e-4, momentum=0.9)
    exchange = os.environ.get("FAULT_EXCHANGE", "ring")
    kind = os.environ.get("FAULT_OPTIMIZER", "dgc")
    if kind == "local":
        return tf_dgc.local_sgd(sgd, 20)
    if kind == "gossip":
        return tf_dgc.LocalOptimizer(
            sgd, 2, collective=tf_dgc.collectives.Gossip(exchange)
        )
    sparsity = 0.0 if EVERYWHERE in ("collective", "dense") else 0.9
    return tf_dgc.DGCOptimizer(sgd, sparsity, collective=exchange)


def main():
    if FAULT == "start":
        die()
    if FAULT == "stopped_start":
        stop()
    if FAULT == "met":
        meet = rendezvous.wait_for_all_workers
        rendezvous.wait_for_all_workers = lambda *arguments: (meet(*arguments), stop())
    strategy = tf_dgc.multi_worker_strategy()
    if FAULT == "variables":
        die()
    units = int(os.environ.get("FAULT_UNITS", "64"))
    with strategy.scope():
        inputs = keras.Input((64,))
        outputs = keras.layers.Dense(1)(keras.layers.Dense(units)(inputs))
        model = SlowTracing(inputs, outputs)
        model.compile(make_optimizer(), "mse")
    x = np.random.default_rng(0).normal(size=(320, 64)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    model.fit(x, y, batch_size=32, epochs=10**6, verbose=0, callbacks=[Steps()])


if __name__ == "__main__":
    main()
