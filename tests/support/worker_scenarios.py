"""Worker program of test_multiworker.py; one process per worker.

    python worker_scenarios.py SCENARIO DIRECTORY

Writes its findings to DIRECTORY/RANK.json.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
import threading
import time

import keras
import numpy as np
import overlaps
import tensorflow as tf

import tf_dgc
from tf_dgc.multiworker import backup as multiworker_backup
from tf_dgc.multiworker import consensus, coordination

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
SGD = keras.optimizers.SGD
LOOPBACK_SENT = pathlib.Path("/sys/class/net/lo/statistics/tx_bytes")


def dgc(sparsity=0.9, track_staleness=False, **settings):
    inner = SGD(0.05, momentum=0.9, **settings)
    return tf_dgc.DGCOptimizer(
        inner, sparsity, diagnostics=tf_dgc.Diagnostics(track_staleness=track_staleness)
    )


def make_model(optimizer, units=40, layers=1, **settings):
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        tokens = keras.Input((5,))
        x = keras.layers.Embedding(50, units)(tokens)
        x = keras.layers.Flatten()(x)
        for _ in range(layers):
            x = keras.layers.Dense(units, activation="relu")(x)
        model = keras.Model(tokens, keras.layers.Dense(1)(x))
        model.compile(optimizer(), "mse", metrics=["mae"], **settings)
    return model


def make_data(examples=70):
    tokens = np.random.default_rng(0).integers(0, 50, (examples, 5))
    return tokens, tokens.mean(axis=1, keepdims=True) / 50.0


def wait_until(condition):
    while not condition():
        time.sleep(0.05)


def digest(arrays):
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(a).data for a in arrays)
    ).hexdigest()


def fit(optimizer=dgc, callbacks=(), validated=False, **settings):
    """Train with uneven last batches; return the model and its results.

    Every epoch creates iterators on all workers, which takes longer than its steps.
    """
    model = make_model(optimizer, **settings)
    x, y = make_data()
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=2,
        shuffle=False,
        validation_data=(x, y) if validated else None,
        validation_freq=2,
        callbacks=[decay, *callbacks],
        verbose=0,
    ).history
    return model, {
        "history": {k: [float(x) for x in v] for k, v in history.items()},
        "weights": digest(model.get_weights()),
        "values": [float(np.sum(np.abs(w))) for w in model.get_weights()],
    }


def monitor_and_checkpoint(directory):
    path = directory / f"{RANK}-{{epoch}}.weights.h5"
    return [
        tf_dgc.callbacks.CompressionMonitor(),
        keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
    ]


def scenario_fit(directory):
    """Train with callbacks and validation; evaluate, predict, save and load."""
    callbacks = monitor_and_checkpoint(directory)
    model, result = fit(lambda: dgc(track_staleness=True), callbacks, validated=True)
    x, y = make_data()
    result["evaluate"] = model.evaluate(x, y, batch_size=16, verbose=0)
    result["predictions"] = model.predict(x, batch_size=16, verbose=0).shape
    if RANK == 0:  # the mean of this worker; others need not call it
        result["staleness"] = model.optimizer.staleness.mean
    result["stats"] = model.optimizer.stats.bytes_per_step
    saved = [v.numpy() for v in model.optimizer.variables]
    model.save(directory / f"{RANK}.keras")
    with STRATEGY.scope():
        loaded_model = keras.models.load_model(directory / f"{RANK}.keras")
    loaded = [v.numpy() for v in loaded_model.optimizer.variables]
    result["restored"] = all(
        np.allclose(a, b, rtol=1e-6, atol=1e-7)
        for a, b in zip(saved, loaded, strict=True)
    )
    result["residual"] = digest([model.optimizer.residual[0].numpy()])
    try:
        tf_dgc.multi_worker_strategy()
    except RuntimeError as error:
        result["second strategy"] = str(error)
    return result


def scenario_logs(directory):
    """Write logs to the same paths on all workers, and to paths of each worker."""
    with STRATEGY.scope():
        inputs = keras.Input((5,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(40)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(dgc(), "mse")
    callbacks = [
        tf_dgc.callbacks.CompressionMonitor(),
        [
            keras.callbacks.TensorBoard(
                directory / "logs", histogram_freq=1, update_freq=1
            ),
            keras.callbacks.CSVLogger(directory / "log.csv"),
        ],
        keras.callbacks.TensorBoard(directory / f"own-{RANK}"),
    ]
    x, y = make_data(64)
    data = {"batch_size": 16, "verbose": 0, "validation_data": (x, y)}
    first = model.fit(x, y, epochs=2, callbacks=callbacks, **data)
    model.fit(x, y, callbacks=callbacks[-1], **data)
    model.fit(x, y, **data)
    return {"history": first.history, "process": os.getpid()}


def scenario_methods(directory):
    results = {}
    for name in os.environ["METHODS"].split(","):
        model, result = fit(
            lambda name=name: tf_dgc.CompressedOptimizer(SGD(0.01), name)
        )
        path = directory / f"{RANK}-{name}.keras"
        model.save(path)
        with STRATEGY.scope():
            loaded = keras.models.load_model(path)
        pairs = zip(model.optimizer.variables, loaded.optimizer.variables, strict=True)
        result["restored"] = all(np.allclose(a.numpy(), b.numpy()) for a, b in pairs)
        results[name] = result
    return results


def scenario_two_levels(directory):
    """Two groups of workers as if on two machines; all four are on this one."""
    hierarchical = tf_dgc.collectives.Hierarchical([[0, 2], [1, 3]])

    def make_optimizer():
        inner = SGD(0.05, momentum=0.9)
        return tf_dgc.DGCOptimizer(inner, 0.9, collective=hierarchical)

    model, result = fit(make_optimizer)
    return {**result, "state": digest_of_local_state(model)}


def scenario_auto(directory):
    """Steps use the algorithm that all workers chose; also after loading."""

    def make_optimizer():
        inner = SGD(0.05, momentum=0.9)
        return tf_dgc.DGCOptimizer(inner, 0.9, collective="auto", min_compress_size=1)

    model, result = fit(make_optimizer)
    path = directory / f"{RANK}.keras"
    model.save(path)
    with STRATEGY.scope():
        loaded = keras.models.load_model(path)
    chosen = [m.optimizer.stats.collective for m in (model, loaded)]
    return {**result, "chosen": chosen}


def scenario_overlap(directory):
    """Train with steps that overlap the backward pass, and with steps that do not."""
    del directory
    results = {}
    for name in os.environ["METHODS"].split(","):
        for overlap in (False, 1e6):

            def make_optimizer(name=name, overlap=overlap):
                settings = {
                    "collective": overlaps.collective(overlap),
                    "min_compress_size": 50,
                }
                if name == "dgc":
                    inner = SGD(0.05, momentum=0.9)
                    return tf_dgc.DGCOptimizer(inner, 0.9, **settings)
                return tf_dgc.CompressedOptimizer(SGD(0.01), name, **settings)

            model, result = fit(make_optimizer)
            result["collective"] = model.optimizer.stats.collective
            results[f"{name} {overlap}"] = result
    return results


def scenario_steps_per_execution(directory):
    warmup = tf_dgc.schedules.PiecewiseConstantSparsity([4, 8], [0.0, 0.9, 0.99])
    results = {}
    for steps in (1, 3):
        callbacks = monitor_and_checkpoint(directory)
        _, result = fit(lambda: dgc(warmup), callbacks, steps_per_execution=steps)
        results[str(steps)] = result["weights"]
    return results


def scenario_stock(directory):
    """Train with stock SGD after `prepare`, and with `sparsity=0`."""
    tf_dgc.prepare(STRATEGY)
    _, stock = fit(lambda: SGD(0.05, momentum=0.9, nesterov=True))
    _, wrapped = fit(lambda: dgc(0.0, nesterov=True))
    settings = {
        "gradient_accumulation_steps": 2,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 2,
    }
    _, stock_averaged = fit(lambda: SGD(0.05, momentum=0.9, **settings))
    _, wrapped_averaged = fit(lambda: dgc(0.0, **settings))
    return {
        "stock": stock["values"],
        "wrapped": wrapped["values"],
        "stock with conditions": stock_averaged["values"],
        "wrapped with conditions": wrapped_averaged["values"],
    }


def scenario_nan(directory):
    """Train with a NaN in the examples of one worker."""
    model = make_model(dgc)
    x, y = make_data(64)
    y[3] = np.nan  # in one worker's half of the first batch
    model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    return {
        "nonfinite": model.optimizer.stats.nonfinite,
        "finite": bool(all(np.all(np.isfinite(w)) for w in model.get_weights())),
        "weights": digest(model.get_weights()),
    }


def scenario_other_sparsity(directory):
    fit(lambda: dgc(0.9 if RANK == 0 else 0.99))


def scenario_other_period(directory):
    """Train with different functions of one name; configs hold only the name."""

    def period(step):
        return tf.constant(2 + RANK, tf.int64) + 0 * step

    fit(lambda: tf_dgc.local_sgd(SGD(0.1), period))


def scenario_other_inner(directory):
    fit(
        lambda: tf_dgc.DGCOptimizer(
            keras.optimizers.Adam(0.1) if RANK == 0 else keras.optimizers.AdamW(0.1)
        ),
    )


def scenario_other_shape(directory):
    tf_dgc.prepare(STRATEGY)
    fit(units=40 if RANK == 0 else 48)


def scenario_more_layers(directory):
    tf_dgc.prepare(STRATEGY)
    fit(layers=1 if RANK == 0 else 2)


def scenario_start(directory):
    """Create variables with equal and with different values; count the bytes sent."""
    tf_dgc.prepare(STRATEGY)
    results = {"equal": start_bytes(0), "different": start_bytes(1 + RANK)}
    with STRATEGY.scope():
        variables = [
            tf.Variable(np.full(shape, RANK, dtype), trainable=False)
            for dtype in ("float16", "bool", "int64", "complex64")
            for shape in ((), (3,), (5, 7), (0, 2))
        ]
        variables.append(tf.Variable(tf.cast(tf.fill([3, 3], RANK), tf.bfloat16)))

        @tf.function
        def create_in_graph():
            if len(variables) == 17:
                variables.append(tf.Variable(tf.random.normal([9], seed=RANK)))
            return variables[-1].read_value()

        STRATEGY.run(create_in_graph)
    results["others"] = str(
        [STRATEGY.experimental_local_results(v)[0] for v in variables]
    )
    return results


def start_bytes(seed):
    """Build a model; return bytes on the loopback, size and digest of the weights."""
    keras.utils.set_random_seed(seed)
    consensus.wait_for_workers(STRATEGY, "start")
    before = LOOPBACK_SENT.read_text()
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((700,)), keras.layers.Dense(3000)])
        optimizer = dgc()
        optimizer.build(model.trainable_variables)
    consensus.wait_for_workers(STRATEGY, "end")
    return {
        "sent": int(LOOPBACK_SENT.read_text()) - int(before),
        "weights": 4 * model.count_params(),
        "digest": digest(model.get_weights()),
    }


def train_before_the_chief_is_alone(directory):
    """Return a trained model and a function that trains it; set a short timeout."""
    model = make_model(dgc)
    x, y = make_data(64)

    def train():
        model.fit(x, y, batch_size=16, verbose=0)

    train()
    consensus.wait_for_workers(STRATEGY, "begin")
    os.environ["TF_DGC_TIMEOUT"] = "3"
    return model, train


def scenario_chief_saves_alone(directory):
    """Save on the chief while the other worker is busy with something else."""
    model, _ = train_before_the_chief_is_alone(directory)
    failed = directory / "failed"
    try:
        if RANK == 0:
            model.save(directory / "model.keras")
    finally:
        if RANK == 0:
            failed.touch()
    wait_until(failed.exists)


def scenario_chief_checkpoints_alone(directory):
    model, train = train_before_the_chief_is_alone(directory)
    if RANK == 0:
        tf.train.Checkpoint(optimizer=model.optimizer).write(str(directory / "c"))
    train()


def train_with_backups(directory, callbacks=(), **settings):
    model = make_model(dgc)
    x, y = make_data(64)
    backup = tf_dgc.callbacks.BackupAndRestore(directory / "backup", **settings)
    data = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=4, callbacks=[backup, *callbacks], **data)
    return model


def digest_of_local_state(model):
    local = STRATEGY.experimental_local_results
    variables = [*model.variables, *model.optimizer.variables]
    return digest(local(v.value)[0].numpy() for v in variables)


def total_residual(model):
    return [v.gather().sum(axis=0, dtype="float64") for v in model.optimizer.residual]


def scenario_backup_until_the_chief_dies(directory):
    """Train to the end; then again, until the chief is killed in its second backup."""
    undisturbed = train_with_backups(directory)
    (directory / f"undisturbed-{RANK}").write_text(digest_of_local_state(undisturbed))

    class DieInTheNextSave(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1 and RANK == 0:
                multiworker_backup.write_manifest = lambda *_: os.kill(
                    os.getpid(), signal.SIGKILL
                )

    train_with_backups(directory, [DieInTheNextSave()])


def scenario_resume(directory):
    model = train_with_backups(directory, delete_checkpoint=False)
    np.savez(directory / f"residual-{RANK}.npz", *total_residual(model))
    expected = (directory / f"undisturbed-{RANK}").read_text()
    return {"equal": digest_of_local_state(model) == expected}


def scenario_resume_elsewhere(directory):
    """Resume with another number of workers, after the last epoch."""
    model = train_with_backups(directory)
    with np.load(directory / "residual-0.npz") as file:
        expected = [file[name] for name in file.files]
    residual = total_residual(model)
    return {
        "weights": digest(model.get_weights()),
        "residual": [
            bool(np.allclose(a, b, rtol=2**-22, atol=1e-12))
            for a, b in zip(residual, expected, strict=True)
        ],
        "largest": max(float(np.abs(a).max()) for a in residual),
        "gone": not (directory / "backup").exists(),
    }


class Scales(keras.callbacks.Callback):
    """Records loss scale and step count after every step."""

    def __init__(self):
        super().__init__()
        self.states = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        variables = (optimizer.dynamic_scale, optimizer.iterations)
        self.states.append([float(v.numpy()) for v in variables])


def scenario_mixed_precision(directory):
    """Train with an example beyond float16 on the last worker: stock and wrapped."""
    tf_dgc.prepare(STRATEGY)
    keras.config.set_dtype_policy("mixed_float16")
    x, y = make_data(64)
    y[13] = 1e30  # in the last worker's half of the first batch
    results = {}
    for name, optimizer in [
        ("stock", lambda: SGD(0.05, momentum=0.9)),
        ("wrapped", lambda: dgc(0.0)),
        ("sparse", dgc),
    ]:
        model = make_model(optimizer)
        scales = Scales()
        model.fit(x, y, batch_size=16, shuffle=False, callbacks=[scales], verbose=0)
        weights = model.get_weights()
        results[name] = {
            "scales": scales.states,
            "weights": digest(weights),
            "values": [float(np.sum(np.abs(w))) for w in weights],
        }
    return results


def scenario_mixed_bfloat16(directory):
    keras.config.set_dtype_policy("mixed_bfloat16")
    return scenario_nan(directory)


def scenario_peer_ends(directory):
    """End one worker by an error; the others notice it in different operations."""
    victim, late = int(os.environ["PEER_VICTIM"]), os.environ["PEER_LATE"] == "1"
    model = make_model(dgc)
    x, y = make_data(64)
    optimizer = model.optimizer

    def train():
        model.fit(x, y, batch_size=16, verbose=0)

    def load():
        with STRATEGY.scope():
            keras.models.load_model(path)

    def create_variable():
        with STRATEGY.scope():
            keras.Variable(1.0)

    train()
    path, weights = directory / f"{RANK}.keras", directory / f"{RANK}.weights.h5"
    model.save(path)
    model.save_weights(weights)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    saved = checkpoint.write(str(directory / f"c-{RANK}"))
    (directory / f"pid-{RANK}").write_text(str(os.getpid()))
    consensus.wait_for_workers(STRATEGY, "begin")
    if victim == RANK:
        time.sleep(0 if late else 2)  # until the others wait for it
        raise ValueError("the disk of this worker is full")
    if late:
        ended = pathlib.Path("/proc", (directory / f"pid-{victim}").read_text())
        wait_until(lambda: not ended.exists())
    operations = {
        "save": lambda: model.save(path),
        "save to one path": lambda: tf_dgc.saving.save_model(
            model, directory / ".keras"
        ),
        "load weights": lambda: model.load_weights(weights),
        "load": load,
        "read": lambda: optimizer.residual[0].numpy(),
        "agree": lambda: consensus.require_equal(STRATEGY, dict),
        "write": lambda: checkpoint.write(str(directory / f"d-{RANK}")),
        "restore": lambda: checkpoint.read(saved),
        "fit": train,
        "make a variable": create_variable,
    }
    return {name: error_of(operation) for name, operation in operations.items()}


def scenario_peer_leaves(directory):
    """End the last worker early, without an error."""
    tf_dgc.prepare(STRATEGY)
    consensus.wait_for_workers(STRATEGY, "begin")
    if RANK == 1:
        sys.exit(3)
    return error_of(lambda: consensus.wait_for_workers(STRATEGY, "go on"))


def error_of(operation):
    """Return type and text of the error that it raises, and seconds until then."""
    start = time.monotonic()
    try:
        operation()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - start]


def scenario_divergence(directory):
    """Change a weight on the last worker, with a warning and then with an error."""
    x, y = make_data(64)
    errors = {}
    for choice in ("warn", "raise"):
        model = make_model(
            lambda choice=choice: tf_dgc.DGCOptimizer(
                SGD(0.01),
                0.9,
                diagnostics=tf_dgc.Diagnostics(check_every=2, on_divergence=choice),
            )
        )
        data = {"batch_size": 16, "shuffle": False, "verbose": 0}
        model.fit(x, y, **data)
        if RANK == 1:
            kernel = model.layers[-1].kernel.value
            STRATEGY.experimental_local_results(kernel)[0].assign_add([[1.0]] * 40)
        try:
            model.fit(x, y, **data)
        except (tf.errors.OpError, RuntimeError) as error:
            errors[choice] = str(error)
    return errors


def scenario_predicts_alone(directory):
    """Predict in a callback of the first worker while the other one trains."""

    class Predict(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if RANK == 0:
                self.model.predict(make_data()[0], verbose=0)  # on this one alone

    fit(callbacks=[Predict()])


def scenario_gradients_of_one(directory):
    """Run a custom loop in which a variable has a gradient on the first worker only."""
    with STRATEGY.scope():
        both = keras.Variable(np.ones([40, 40]), name="both")
        alone = keras.Variable(np.ones([40, 40]), name="alone")
        optimizer = dgc()
        optimizer.build([both, alone])

    @tf.function
    def step(several):
        def replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(both.value)
                if several:
                    loss += tf.reduce_sum(alone.value)
            gradients = tape.gradient(loss, [both.value, alone.value])
            optimizer.apply(gradients, [both, alone])

        STRATEGY.run(replica)

    for several in json.loads(os.environ["BEFORE"]):
        step(several)
    step(RANK == 0)  # the first one with both


def scenario_gradients_of_one_stock(directory):
    """Train by a Keras optimizer; a layer uses its weight on the first worker only."""

    class Branch(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), name="scale")

        def call(self, x):
            return x * self.scale if RANK == 0 else x

    tf_dgc.prepare(STRATEGY)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((5,)), Branch(), keras.layers.Dense(1)])
        model.compile(SGD(0.1), "mse")
    model.fit(*make_data(), batch_size=16, verbose=0)


def scenario_other_function(directory):
    """Run a function that has a second reduction on the first worker only."""
    tf_dgc.prepare(STRATEGY)

    @tf.function
    def step(several):
        value = STRATEGY.run(lambda: tf.ones([3]))
        total = STRATEGY.reduce("SUM", value, axis=None)
        if several:
            total += STRATEGY.reduce("SUM", tf.ones([3, 1]), axis=None)[:, 0]
        return total

    step(several=RANK == 0)
    STRATEGY.reduce("SUM", tf.ones([7]), axis=None)


def longest_standstill(wait):
    """Return the longest pause of another Python thread meanwhile, and the error."""
    ended = threading.Event()
    error = []

    def run():
        try:
            wait()
        except tf.errors.OpError as raised:
            error.append(type(raised).__name__)
        ended.set()

    longest, last = 0.0, time.monotonic()
    threading.Thread(target=run).start()
    while not ended.wait(0.01):
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return [max(longest, time.monotonic() - last), *error]


def least_standstill(wait):
    """Return the least of three attempts: a busy machine also makes threads wait."""
    return min(longest_standstill(lambda i=i: wait(str(i))) for i in range(3))


def scenario_coordination(directory):
    coordination.publish(f"note {RANK}", f"größe {RANK}", 20)
    coordination.wait_at_barrier("all are here", 60)
    results = {"notes": [coordination.lookup(f"note {rank}", 20) for rank in (0, 1)]}
    if RANK == 0:
        for name, wait in [
            ("set twice", lambda _: coordination.publish("note 0", "another", 20)),
            ("lookup", lambda name: coordination.lookup(name, 1)),
            ("barrier", lambda name: coordination.wait_at_barrier(name, 1)),
        ]:
            results[name] = least_standstill(wait)
        coordination.unpublish("note 0", 20)
        coordination.publish("note 0", "again", 20)
    coordination.wait_at_barrier("end", 60)
    results["again"] = coordination.lookup("note 0", 20)
    coordination.wait_at_barrier("all have read", 60)
    return results


def main(scenarios):
    folder = pathlib.Path(sys.argv[2])
    findings = scenarios[f"scenario_{sys.argv[1]}"](folder)
    (folder / f"{RANK}.json").write_text(json.dumps(findings))


if __name__ == "__main__":
    main(globals())
