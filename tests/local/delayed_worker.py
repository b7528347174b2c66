"""Worker script of test_delayed_averaging_workers.py, started once per worker.

    python delayed_worker.py DIRECTORY MODE

Writes its results to DIRECTORY/RANK.json. The last worker is late. With MODE "late" it
waits until the first worker cannot continue without it, with "hangs" it exceeds the
timeout, and with "fails" it raises an error.
"""

import pathlib
import sys
import time

import keras
import numpy as np
import on_worker
from on_worker import local_value

import tf_dgc

PERIOD = 3
X, Y = on_worker.data(144)


class LateWorker(keras.callbacks.Callback):
    """Makes the last worker late in its second round; records when batches end.

    All processes of a machine share the clock of these times.
    """

    def __init__(self, mode, has_continued):
        super().__init__()
        self.mode, self.has_continued = mode, has_continued
        self.end_times = []
        self.started = []
        self.return_time = None

    def on_train_batch_end(self, batch, logs=None):
        self.end_times.append(time.monotonic())
        self.started.append(sum(on_worker.started_collectives().values()))
        if on_worker.RANK == 0 and batch == 2 * PERIOD + 1:
            self.has_continued.touch()
        if on_worker.RANK == 1 and batch == PERIOD + 1:
            self.be_late()

    def be_late(self):
        if self.mode == "fails":
            raise ValueError("it broke")
        if self.mode == "hangs":
            time.sleep(12.0)
            return
        until = time.monotonic() + 60
        while not self.has_continued.exists():
            assert time.monotonic() < until, "the other worker did not continue"
            time.sleep(0.01)
        time.sleep(0.5)  # longer than a step that does not wait
        self.return_time = time.monotonic()


def make_model():
    def make_optimizer():
        adam = keras.optimizers.Adam(0.01)
        return tf_dgc.diloco(adam, PERIOD, delay=PERIOD, collective="tree")

    return on_worker.make_model(make_optimizer, metrics=["mae"])


def state(model):
    model.optimizer.background.finish()
    return [local_value(v) for v in (*model.variables, *model.optimizer.variables)]


def main(directory, mode):
    model, callback = make_model(), LateWorker(mode, directory / "gone_on")
    settings = {"batch_size": 12, "shuffle": False, "verbose": 0}
    model.fit(X, Y, callbacks=[callback], **settings)
    path = directory / "model.weights.h5"
    tf_dgc.saving.save_weights(model, path)
    restored_model = on_worker.restore_model(make_model, path)
    is_restored = state(model) == state(restored_model)
    for m in (model, restored_model):
        m.fit(X, Y, **settings)
    resumes = state(model) == state(restored_model)
    evaluated = model.evaluate(X, Y, batch_size=12, verbose=0)
    anchor = [a.numpy().tolist() for a in model.optimizer.anchor]
    model.optimizer.consensus()
    results = {
        "ended": callback.end_times,
        "back": callback.return_time,
        "started": np.diff(callback.started).tolist(),
        "rounds": model.optimizer.stats.steps,
        "restored": is_restored,
        "goes on": resumes,
        "anchor": anchor,
        "evaluated": evaluated,
        "consensus": [local_value(v) for v in model.trainable_variables],
    }
    on_worker.write(directory, results)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
