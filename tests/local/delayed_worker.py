"""What the workers of test_delayed_averaging_workers.py do; started once per worker.

    python delayed_worker.py DIRECTORY MODE

Writes its findings to DIRECTORY/RANK.json. The last worker is late: by MODE "late" it
stays away until the first one has gone on without it for as long as it may, by "hangs"
for longer than it is waited for, and by "fails" it raises.
"""

import pathlib
import sys
import time

import keras
import numpy as np
import on_worker
from on_worker import own

import tf_dgc

PERIOD = 3
X, Y = on_worker.data(144)


class Late(keras.callbacks.Callback):
    """Lets the last worker be late in its second round; records when batches end.

    All times are of the one clock that the processes of a machine have in common.
    """

    def __init__(self, mode, gone_on):
        super().__init__()
        self.mode, self.gone_on = mode, gone_on
        self.ended, self.started, self.back = [], [], None

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(time.monotonic())
        self.started.append(sum(on_worker.started().values()))
        if on_worker.RANK == 0 and batch == 2 * PERIOD + 1:
            self.gone_on.touch()
        if on_worker.RANK == 1 and batch == PERIOD + 1:
            self.be_late()

    def be_late(self):
        if self.mode == "fails":
            raise ValueError("it broke")
        if self.mode == "hangs":
            time.sleep(12.0)
            return
        until = time.monotonic() + 60
        while not self.gone_on.exists():
            assert time.monotonic() < until, "the other one did not go on"
            time.sleep(0.01)
        time.sleep(0.5)  # long enough for a step that does not wait
        self.back = time.monotonic()


def make_model():
    def make_optimizer():
        adam = keras.optimizers.Adam(0.01)
        return tf_dgc.diloco(adam, PERIOD, delay=PERIOD, collective="tree")

    return on_worker.make_model(make_optimizer, metrics=["mae"])


def state(model):
    model.optimizer.background.finish()
    return [own(v) for v in (*model.variables, *model.optimizer.variables)]


def main(directory, mode):
    model, late = make_model(), Late(mode, directory / "gone_on")
    settings = {"batch_size": 12, "shuffle": False, "verbose": 0}
    model.fit(X, Y, callbacks=[late], **settings)
    path = directory / "model.weights.h5"
    tf_dgc.saving.save_weights(model, path)
    again = on_worker.restored(make_model, path)
    restored = state(model) == state(again)
    for m in (model, again):
        m.fit(X, Y, **settings)
    goes_on = state(model) == state(again)
    seen = model.evaluate(X, Y, batch_size=12, verbose=0)
    anchor = [a.numpy().tolist() for a in model.optimizer.anchor]
    model.optimizer.consensus()
    findings = {
        "ended": late.ended,
        "back": late.back,
        "started": np.diff(late.started).tolist(),
        "rounds": model.optimizer.stats.steps,
        "restored": restored,
        "goes on": goes_on,
        "anchor": anchor,
        "evaluated": seen,
        "consensus": [own(v) for v in model.trainable_variables],
    }
    on_worker.write(directory, findings)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
