"""Program of the workers of test_stuck_worker.py: the last one gets stuck in `fit`.

    python stuck_worker.py HOW

With "locked" as HOW it holds Python's lock for ever, with "asleep" it does not.
"""

import ctypes
import json
import os
import sys
import time

import keras
import numpy as np

import tf_dgc

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


class GetStuck(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if RANK == 1 and batch == 20:
            print("stuck", flush=True)
            time.sleep(7.0)  # until it has published that it waits for no worker
            if sys.argv[1] == "locked":
                ctypes.PyDLL(None).sleep(10_000)
            time.sleep(10_000)


def main():
    strategy = tf_dgc.multi_worker_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile(tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.ones((1000, 8), "float32")
    y = np.ones((1000, 1), "float32")
    model.fit(x, y, batch_size=4, epochs=10, verbose=0, callbacks=[GetStuck()])


if __name__ == "__main__":
    main()
