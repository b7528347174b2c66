"""Program of the workers of test_server_faults.py, started once per worker.

    python server_fault_worker.py MODE FAULT STEPS

Trains for STEPS steps and prints every one. The last worker causes FAULT itself.
"""

import json
import os
import sys
import time

import keras
import numpy as np

import tf_dgc

MODE, FAULT, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
TASK = json.loads(os.environ["TF_CONFIG"])["task"]
FAULT_STEP = 10
SETTINGS = {"ssp": {"staleness": 2}, "backup": {"quorum": 2}}


class Steps(keras.callbacks.Callback):
    """Prints every step, and causes faults between steps."""

    count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        print("step", self.count, "clock", int(self.model.optimizer.iterations))
        if TASK["index"] == 2 and self.count == FAULT_STEP:
            self.fault()
        time.sleep(0.01)

    def fault(self):
        print("FAULT", flush=True)
        if FAULT == "error":
            raise ValueError("the disk of this worker is full")
        if FAULT == "evaluates":
            until = time.monotonic() + float(os.environ["FAULT_SECONDS"])
            while time.monotonic() < until:
                np.ones([100, 100]) @ np.ones([100, 100])


def main():
    layers = [keras.layers.Dense(64), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    sgd = keras.optimizers.SGD(1e-4, momentum=0.9)
    settings = SETTINGS.get(MODE, {})
    model.compile(tf_dgc.ServerOptimizer(sgd, MODE, **settings), "mse")
    x = np.random.default_rng(TASK["index"]).normal(size=(32, 64)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    model.fit(x, y, batch_size=32, epochs=STEPS, verbose=0, callbacks=[Steps()])
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
