"""Program of the workers of test_loops.py, started once per worker.

    python loop_worker.py SCENARIO DIRECTORY

Writes its findings to DIRECTORY/RANK.json.
"""

import json
import os
import pathlib
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc.multiworker import cross_device

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
STRATEGY = tf_dgc.multi_worker_strategy()
SGD = keras.optimizers.SGD
RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 5)).astype("float32")
Y = X.mean(axis=1, keepdims=True)
QUIET = {"verbose": 0, "shuffle": False}


class Tensors(keras.Model):
    """Logs plain tensors: one value per example of the batch, and scalars."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(self(x) - y)[:, 0]
            loss = tf.reduce_sum(errors) / 16.0
        variables = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables, strict=True)
        )
        return {"errors": errors, "first": tf.reduce_sum(errors), "steps": 3}

    test_step = train_step


def make_model(optimizer=None, layers=(), **settings):
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        model = keras.Sequential(
            [keras.Input((5,)), *[make() for make in layers], keras.layers.Dense(1)]
        )
        optimizer = optimizer or tf_dgc.DGCOptimizer(SGD(0.0), 0.5)
        model.compile(optimizer, "mse", metrics=["mae"], **settings)
    return model


def count_started_collectives():
    return cross_device.cross_device_ops(STRATEGY).count()[None][0]


class Counts(keras.callbacks.Callback):
    """Records the number of collectives started up to the end of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(count_started_collectives())
        self.logs = logs

    def per_step(self):
        """Return the numbers of collectives per step, without an epoch's first step."""
        counts = np.diff(self.seen) / self.model.steps_per_execution
        return sorted(set(counts.tolist()))


class StopAt(keras.callbacks.Callback):
    def __init__(self, step, ranks=(0, 1)):
        super().__init__()
        self.step, self.ranks, self.steps = step, ranks, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.step and RANK in self.ranks:
            self.model.stop_training = True


class StopAfter(keras.callbacks.Callback):
    """Stops after the second call of a hook, on one worker."""

    def __init__(self, rank, hook):
        super().__init__()
        self.epochs, self.rank = 0, rank
        setattr(self, hook, self.stop)

    def stop(self, *args, **kwargs):
        self.epochs += 1
        if self.epochs == 2 and self.rank == RANK:
            self.model.stop_training = True


def make_dataset(examples=70):
    return tf.data.Dataset.from_tensor_slices((X[:examples], Y[:examples])).batch(16)


def make_generator_dataset(lengths):
    def batches():
        for i, length in enumerate(lengths):
            # TensorFlow would write to the arrays that it gets.
            yield X[16 * i :][:length].copy(), Y[16 * i :][:length].copy()

    spec = tf.TensorSpec([None, 5]), tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return X[16 * i :][:16].copy(), Y[16 * i :][:16].copy()


def scenario_meetings(directory):
    """Collectives per step of `fit`, and the logs."""
    result = {"per_step": {}, "history": {}}
    arrays = {"x": X, "y": Y, "batch_size": 16}
    eager = make_model(run_eagerly=True)
    several = make_model(steps_per_execution=2)
    model = make_model()
    for name, trained, arguments in [
        ("eager", eager, arrays),
        ("executions of 64", several, {"x": make_dataset(64)}),
        ("arrays", model, {**arrays, "class_weight": {0: 1.0}}),
        ("data set", model, {"x": make_dataset(), "steps_per_epoch": 5}),
        ("py_dataset", model, {"x": Batches()}),
        ("repeated 64", model, {"x": make_dataset(64).repeat(), "steps_per_epoch": 4}),
        ("unknown", model, {"x": make_generator_dataset([16, 16, 16, 16, 6])}),
    ]:
        counts = Counts()
        history = trained.fit(**arguments, callbacks=[counts], **QUIET).history
        result["per_step"][name] = counts.per_step()
        result["history"][name] = [history["loss"][0], history["mae"][0]]
    result["evaluate"] = model.evaluate(X, Y, batch_size=16, verbose=0)
    # The same functions, with another kind of data
    result["evaluate unknown"] = model.evaluate(
        make_generator_dataset([16] * 4 + [6]), verbose=0
    )
    result["last step"] = float(counts.logs["loss"])
    result["expected"] = mean_errors(model, X, Y)
    result["expected of 64"] = mean_errors(model, X[:64], Y[:64])
    result["on batches after"] = on_batches(model)
    result["on batches before"] = on_batches(make_model())
    errors = [mean_errors(model, X[:16] * scale, Y[:16]) for scale in (1, 2)]
    result["expected on batches"] = 2 * [np.mean(errors, axis=0).tolist()]
    return result


def scenario_alone(directory):
    """Collectives per step of local steps, and warnings about them."""
    result = {}
    for name, arguments in [
        ("known", {"x": make_dataset()}),
        ("repeated", {"x": make_dataset(64).repeat(), "steps_per_epoch": 5}),
        ("unknown", {"x": make_generator_dataset([16, 16, 16, 16, 6])}),
    ]:
        with STRATEGY.scope():
            optimizer = tf_dgc.local_sgd(SGD(0.1), 100)
        model = make_model(optimizer)
        counts = Counts()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(**arguments, callbacks=[counts], **QUIET)
        messages = [str(w.message) for w in caught]  # Keras's are among them
        messages = [m for m in messages if m.startswith("In every step")]
        result[name] = {"per_step": counts.per_step(), "said": messages}
    return result


def on_batches(model):
    """Train and test on one batch that differs between the workers."""
    functions = model.train_on_batch, model.test_on_batch
    return [f(X[:16] * (1 + RANK), Y[:16]) for f in functions]


def mean_errors(model, x, y):
    """Return mean squared and mean absolute error."""
    error = x @ model.get_weights()[0] + model.get_weights()[1] - y
    return [float(np.mean(error**2)), float(np.mean(np.abs(error)))]


def scenario_tensors(directory):
    """Logs that are no metrics: those of the last step, over all workers."""
    with STRATEGY.scope():
        model = Tensors()
        model.compile(SGD(0.0))
        model.build((None, 5))
    result = {}
    for name, examples in [("uneven", 70), ("even", 64)]:
        history = model.fit(X[:examples], Y[:examples], batch_size=16, **QUIET).history
        result[name] = {key: values[0] for key, values in history.items()}
    last_batches = {"uneven": slice(64, 70), "even": slice(48, 64)}
    for name, batch in last_batches.items():
        errors = np.square(X[batch].sum(axis=1, keepdims=True) - Y[batch])
        result[f"expected {name}"] = [float(errors.mean()), float(errors.sum() / 2)]
    return result


def scenario_stops(directory):
    """Callbacks that stop training within an epoch, on all or some workers."""
    result = {}
    model = make_model()
    nan = Y.copy()
    nan[3] = np.nan  # in the first worker's half of the first batch
    for name, callback, targets in [
        ("all", StopAt(3), Y),
        ("one", StopAt(3, [1]), Y),
        ("last step", StopAt(5, [0]), Y),
        ("early", keras.callbacks.EarlyStopping("loss", patience=1), Y),
        ("nan", keras.callbacks.TerminateOnNaN(), nan),
        ("epoch's end", StopAfter(0, "on_epoch_end"), Y),
        ("validation", StopAfter(1, "on_test_end"), Y),
    ]:
        counts = Counts()
        data = {"x": X, "y": targets, "batch_size": 16, "epochs": 3}
        if name == "validation":
            data["validation_data"] = X, Y
        if name in ("all", "one", "nan"):
            repeated = tf.data.Dataset.from_tensor_slices((X, targets)).repeat()
            data = {"x": repeated.batch(16), "steps_per_epoch": 1000}
        history = model.fit(**data, callbacks=[counts, callback], **QUIET).history
        weights = [float(np.abs(w).sum()) for w in model.get_weights()]
        result[name] = {
            "steps": len(counts.seen),
            "epochs": len(history["loss"]),
            "weights": weights,
        }
    return result


def scenario_statistics(directory):
    """Moving statistics: after an epoch, when saved, and in a custom loop."""
    layers = [keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.5)]
    model = make_model(layers=layers)
    normalization = model.layers[0]
    x = X + 10.0 * RANK  # every worker has different data
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(16).with_options(options)

    class Recorder(keras.callbacks.Callback):
        """Records statistics before they are averaged, and when callbacks may save."""

        def __init__(self):
            super().__init__()
            self.local = self.averaged = self.validated = None

        def on_train_batch_end(self, batch, logs=None):
            self.local = statistics()

        def on_epoch_end(self, epoch, logs=None):
            self.averaged = statistics()

        def on_test_begin(self, logs=None):
            self.validated = statistics()

    def statistics():
        variables = normalization.moving_mean, normalization.moving_variance
        return [v.numpy().tolist() for v in variables]

    callback = Recorder()
    model.fit(data, validation_data=data, callbacks=[callback], verbose=0)
    result = {
        "local": callback.local,
        "averaged": callback.averaged,
        "validated": callback.validated,
        "after": statistics(),
    }

    normalization.moving_mean.assign(tf.fill([5], float(RANK)))
    before = count_started_collectives()
    tf_dgc.average_statistics(model)
    result["own loop"] = statistics()[0]
    result["collectives"] = count_started_collectives() - before
    normalization.moving_mean.assign(tf.fill([5], float(RANK)))
    tf_dgc.saving.save_weights(model, directory / "own.weights.h5")
    result["saved"] = statistics()[0]
    normalization.moving_mean.assign(tf.fill([5], float(RANK)))
    model.evaluate(data, verbose=0)
    result["before evaluation"] = statistics()[0]
    return result


def scenario_unequal(directory):
    """The last worker runs out of batches before the first."""
    lengths = [70, 38]
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    model = make_model()
    counts = Counts()
    data = make_dataset(lengths[RANK]).with_options(options)
    unsized = data.filter(lambda *_: True)
    result = {}
    for name, loop, arguments in [
        ("fit", model.fit, {"x": data}),
        ("evaluate", model.evaluate, {"x": data}),
        ("epochs", model.fit, {"x": data, "steps_per_epoch": 3, "epochs": 2}),
        ("by steps", model.evaluate, {"x": data, "steps": 4}),
        ("one told", model.fit, {"x": [data, unsized][RANK]}),
        ("validation", model.fit, {"x": unsized, "validation_data": data}),
    ]:
        try:
            loop(**arguments, verbose=0)
        except ValueError as error:
            result[name] = str(error)
    limited = {"steps_per_epoch": 1, "epochs": 4, "initial_epoch": 1}
    result["limited"] = model.fit(data, **limited, **QUIET).history["loss"]
    history = model.fit(unsized, callbacks=[counts], **QUIET).history
    x, y = (np.concatenate([a[:n] for n in lengths]) for a in (X, Y))
    return {
        **result,
        "steps": len(counts.seen),
        "per_step": counts.per_step(),
        "logs": [history["loss"][0], history["mae"][0]],
        "expected": mean_errors(model, x, y),
    }


class Recording(keras.layers.Layer):
    """Records its inputs in eager training steps."""

    def __init__(self):
        super().__init__()
        self.shares = []

    def call(self, x, training=False):
        if training and tf.executing_eagerly():
            self.shares.append(x.numpy().tolist())
        return x


def scenario_empty_shares(directory):
    """Moving statistics when a worker has no example of a batch."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    dataset = make_dataset([33, 17][RANK]).with_options(options).filter(lambda *_: True)
    result = {}
    for name, data in [
        ("arrays", {"x": X[:33], "y": Y[:33], "batch_size": 16}),
        ("unequal", {"x": dataset}),
    ]:
        result[name] = {}
        for key in ("eager", "traced"):
            layers = [Recording, lambda: keras.layers.BatchNormalization(momentum=0.5)]
            model = make_model(layers=layers, run_eagerly=key == "eager")
            validation = {} if key == "eager" else {"validation_data": (X, Y)}
            history = model.fit(**data, **validation, **QUIET).history
            normalization = model.layers[1]
            variables = normalization.moving_mean, normalization.moving_variance
            result[name][key] = [v.numpy().tolist() for v in variables]
            if key == "eager":
                result[name]["shares"] = model.layers[0].shares
        result[name]["val_loss"] = history["val_loss"][0]
    return result


def scenario_again(directory):
    """A second call of `multi_worker_strategy`, with and without other options."""
    options = tf.distribute.experimental.CommunicationOptions
    same = [tf_dgc.multi_worker_strategy() is STRATEGY for _ in range(2)]
    try:
        tf_dgc.multi_worker_strategy(options(timeout_seconds=3.0))
    except ValueError as error:
        return {"same": same, "error": str(error)}


SCENARIOS = [
    scenario_meetings,
    scenario_unequal,
    scenario_stops,
    scenario_statistics,
    scenario_empty_shares,
    scenario_alone,
    scenario_again,
]


def scenario_all(directory):
    """All scenarios, in one start of the processes."""
    names = [f.__name__.removeprefix("scenario_").replace("_", " ") for f in SCENARIOS]
    return {n: f(directory) for n, f in zip(names, SCENARIOS, strict=True)}


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[2])
    findings = globals()[f"scenario_{sys.argv[1]}"](folder)
    (folder / f"{RANK}.json").write_text(json.dumps(findings))
