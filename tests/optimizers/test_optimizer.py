"""`DGCOptimizer` through the interface of Keras."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients
from selection import rows

import tf_dgc
from tf_dgc.callbacks import find_compressed_optimizer
from tf_dgc.multiworker.worker_variables import PerWorkerVariable

O = keras.optimizers  # noqa: E741


def make_model(inputs=20):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(100, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def make_data(examples=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, 20)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def fit_model(optimizer, strategy=None, **fit):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make_model()
        model.compile(optimizer() if callable(optimizer) else optimizer, "mse")
    fit = {"epochs": 2, "batch_size": 16, "verbose": 0, **fit}
    model.fit(*make_data(), **fit)
    return model


def make_momentum_dgc():
    return tf_dgc.DGCOptimizer(O.SGD(0.05, momentum=0.9, clipnorm=1.0), 0.9)


# --- configuration ------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner",
    [
        O.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=2.0, name="mine"),
        O.SGD(O.schedules.CosineDecay(0.1, 10), momentum=0.5, weight_decay=0.1),
        O.AdamW(0.01, global_clipnorm=1.0, use_ema=True),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {
            "sparsity": 0.99,
            "corrections": tf_dgc.Corrections(factor_masking=False),
            "min_compress_size": 7,
            "seed": 3,
        },
        {"value_dtype": "bfloat16"},
        {
            "sparsity": tf_dgc.schedules.WarmupSparsity(10),
            "corrections": tf_dgc.Corrections(momentum=False),
        },
    ],
)
def test_config_round_trip(inner, settings):
    passed = inner.get_config()
    optimizer = tf_dgc.DGCOptimizer(inner, **settings, name="dgc")
    assert inner.get_config() == passed  # the user's object is not changed
    config = optimizer.get_config()
    assert config["inner"]["config"] == passed
    data = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(copy.deepcopy(data))
    assert isinstance(again, tf_dgc.DGCOptimizer)
    assert again.get_config() == config
    assert keras.optimizers.get(O.serialize(optimizer)).get_config() == config


def test_config_holds_the_current_learning_rate():
    optimizer = make_momentum_dgc()
    optimizer.learning_rate = 0.25
    assert optimizer.get_config()["inner"]["config"]["learning_rate"] == 0.25


def test_the_wrapper_applies_momentum_and_clipping():
    optimizer = make_momentum_dgc()
    assert optimizer.inner_optimizer.momentum == 0.0
    assert optimizer.inner_optimizer.clipnorm is None


def test_is_a_keras_optimizer():
    assert isinstance(make_momentum_dgc(), keras.optimizers.Optimizer)


def test_a_lambda_as_learning_rate():
    optimizer = tf_dgc.DGCOptimizer(O.SGD(lambda: 0.5), 0.9)
    assert optimizer.learning_rate == 0.5
    fit_model(optimizer)


def test_weight_decay_exclusions_are_preserved():
    inner = O.SGD(0.1, weight_decay=0.5)
    inner.exclude_from_weight_decay(var_names=["bias"])
    model = fit_model(tf_dgc.DGCOptimizer(inner, 0.9), epochs=1)
    rule = model.optimizer.inner_optimizer
    kernel, bias = model.trainable_variables[:2]
    assert rule._use_weight_decay(kernel)
    assert not rule._use_weight_decay(bias)


# --- learning rate and iterations -----------------------------------------------------


def test_learning_rate_get_and_set():
    optimizer = make_momentum_dgc()
    assert float(optimizer.learning_rate) == pytest.approx(0.05)
    optimizer.learning_rate = 0.5
    assert float(optimizer.learning_rate) == 0.5


def test_learning_rate_callbacks():
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    plateau = keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=1, min_delta=1e9
    )
    model = fit_model(make_momentum_dgc, epochs=3, callbacks=[scheduler])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05 / 8)
    model = fit_model(make_momentum_dgc, epochs=3, callbacks=[plateau])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05 / 4)


def test_iterations_are_counted_once():
    model = fit_model(make_momentum_dgc, epochs=3)
    optimizer = model.optimizer
    assert int(optimizer.iterations) == 12
    assert optimizer.iterations is optimizer.inner_optimizer.iterations
    names = [v.path for v in optimizer.variables]
    assert len(names) == len({id(v) for v in optimizer.variables})
    assert sum("iteration" in name for name in names) == 1


@pytest.mark.parametrize(("corrects", "expected"), [(True, -1.0), (False, -10.0)])
def test_which_steps_learning_rate_scales_an_entry(corrects, expected):
    """That of the gradient's step, or that of the step that sends the entry."""
    trainer = Trainer(
        tf.distribute.get_strategy(),
        lambda: tf_dgc.DGCOptimizer(
            O.SGD(1.0),
            0.9995,
            min_compress_size=1,
            corrections=tf_dgc.Corrections(scale_before_accumulation=corrects),
        ),
        [np.zeros((2, 1000), "float32")],
    )
    gradient = np.zeros((2, 1000), "float32")
    gradient[0, 3], gradient[1, 4] = 2.0, 1.0
    trainer.step([[gradient]])
    assert trainer.weights()[0][0, 3] == -2.0
    assert trainer.weights()[0][1, 4] == 0.0
    trainer.optimizer.learning_rate = 10.0
    trainer.step([[np.zeros_like(gradient)]])
    assert trainer.weights()[0][1, 4] == expected


# --- training -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "num_workers"),
    [
        (lambda: O.SGD(0.01, momentum=0.9), 1),
        pytest.param(lambda: O.AdamW(0.01), 2, marks=pytest.mark.slow),
        pytest.param(lambda: O.SGD(0.01, momentum=0.9), 2, marks=pytest.mark.slow),
        pytest.param(lambda: O.Adam(0.01), 1, marks=pytest.mark.slow),
        pytest.param(lambda: O.RMSprop(0.01), 1, marks=pytest.mark.slow),
    ],
    ids=["sgd", "adamw-2", "sgd-2", "adam", "rmsprop"],
)
def test_fit_learns(strategies, inner, num_workers):
    with strategies[num_workers].scope():
        model = make_model()
        corrects = not isinstance(inner(), O.RMSprop)
        optimizer = tf_dgc.DGCOptimizer(
            inner(), 0.9, corrections=tf_dgc.Corrections(adam=corrects)
        )
        model.compile(optimizer, "mse", metrics=["mae"])
    x, y = make_data(250)  # an uneven last batch
    before = model.evaluate(x, y, verbose=0)[0]
    history = model.fit(
        x, y, epochs=4, batch_size=32, validation_data=(x, y), verbose=0
    ).history
    assert history["val_loss"][-1] < 0.7 * before
    assert model.evaluate(x, y, verbose=0)[0] == pytest.approx(
        history["val_loss"][-1], rel=1e-4
    )
    assert model.predict(x, verbose=0).shape == (250, 1)


@pytest.mark.parametrize("num_workers", rows([1, 2], [1]))
def test_steps_per_execution_changes_nothing(strategies, num_workers):
    weights = []
    for steps in (1, 3):
        keras.utils.set_random_seed(0)
        with strategies[num_workers].scope():
            model = make_model()
            model.compile(make_momentum_dgc(), "mse", steps_per_execution=steps)
        model.fit(*make_data(), batch_size=16, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
        assert model.optimizer.stats.steps == 8
    for one, three in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize(
    ("settings", "value_dtype"),
    [
        ({"run_eagerly": True}, None),
        pytest.param({"jit_compile": True}, "bfloat16", marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:XLA compiles this step")
def test_eager_and_xla_equal_the_graph(settings, value_dtype):
    weights = []
    for compile_settings in ({}, settings):
        keras.utils.set_random_seed(0)
        model = make_model()
        inner = O.SGD(0.05, momentum=0.9, clipnorm=1.0)
        optimizer = tf_dgc.DGCOptimizer(inner, 0.9, value_dtype=value_dtype)
        model.compile(optimizer, "mse", **compile_settings)
        model.fit(*make_data(), batch_size=16, epochs=1, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for graph, other in zip(*weights, strict=True):
        np.testing.assert_allclose(graph, other, rtol=1e-4, atol=1e-5)


def test_eager_replicas(strategies):
    """Eager replicas run one after the other; the exchange must not deadlock."""
    weights = initial_weights("float32")
    steps = make_gradients(2, 3, "float32")
    results = []
    for traced in (False, True):
        trainer = Trainer(strategies[2], make_momentum_dgc, weights, traced=traced)
        for gradients in steps:
            trainer.step(gradients)
        results.append(trainer.weights())
    for eager, graph in zip(*results, strict=True):
        np.testing.assert_allclose(eager, graph, rtol=1e-6)


def test_train_on_batch_and_unbuilt_models():
    model = keras.Sequential([keras.layers.Dense(30), keras.layers.Dense(1)])
    model.compile(make_momentum_dgc(), "mse")
    x, y = make_data()
    first = model.train_on_batch(x, y)
    for _ in range(20):
        last = model.train_on_batch(x, y)
    assert last < first


@pytest.mark.parametrize("num_workers", [1, 2])
def test_embedding_gradients(strategies, num_workers):
    """`IndexedSlices` with repeated indices equal the same dense gradient."""
    tokens = np.random.default_rng(0).integers(0, 50, (32, 6))
    results = []
    for output in ("dense", "sparse"):
        keras.utils.set_random_seed(0)
        with strategies[num_workers].scope():
            embedding = keras.layers.Embedding(50, 40)
            if output == "dense":
                embedding = keras.layers.Dense(40, use_bias=False)
            head = [keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([embedding, *head])
            model.compile(make_momentum_dgc(), "mse")
            x = np.eye(50, dtype="float32")[tokens] if output == "dense" else tokens
            model.build((None, *x.shape[1:]))
        rng = np.random.default_rng(1)
        model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
        model.fit(x, np.ones((32, 1)), batch_size=8, shuffle=False, verbose=0)
        results.append(model.get_weights())
    for dense, sparse in zip(*results, strict=True):
        np.testing.assert_allclose(dense, sparse, rtol=1e-4, atol=1e-5)


SQUARING = {
    "adam": lambda: O.Adam(0.125),
    "rmsprop": lambda: O.RMSprop(0.125),
    "clipped sgd": lambda: O.SGD(0.125, global_clipnorm=0.5),
}


@pytest.mark.parametrize("inner", ["momentum", *SQUARING])
def test_with_sparsity_0_repeated_rows_are_summed_before_squaring(inner):
    """Keras does so with a dense gradient only; it squares rows one by one."""
    make = SQUARING.get(inner, lambda: O.SGD(0.125, momentum=0.5))
    values = np.random.default_rng(0).normal(size=(3, 40)).astype("float32")
    rows = tf.IndexedSlices(values, np.array([3, 7, 3]), tf.constant([50, 40]))
    weights = []
    for optimizer, gradient in (
        (tf_dgc.DGCOptimizer(make(), 0.0), rows),
        (make(), tf.convert_to_tensor(rows)),
        (make(), rows),
    ):
        table = keras.Variable(np.ones((50, 40), "float32"))
        for _ in range(3):
            optimizer.apply([gradient], [table])
        weights.append(table.numpy())
    wrapped, from_dense, from_rows = weights
    np.testing.assert_allclose(wrapped, from_dense, rtol=1e-5, atol=1e-5)
    assert np.allclose(from_rows, from_dense, atol=1e-5) is (inner == "momentum")


def test_variables_without_gradient_do_not_change():
    used, unused = (keras.Variable(np.ones((40, 40), "float32")) for _ in range(2))
    optimizer = make_momentum_dgc()
    optimizer.build([used, unused])
    gradient = tf.ones((40, 40))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply_gradients([(gradient, used), (None, unused)])
    np.testing.assert_array_equal(unused.numpy(), 1)
    optimizer.apply([gradient], [used])  # a part of the variables is allowed
    assert np.any(used.numpy() != 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    variable = keras.Variable(np.zeros((40, 40)), dtype=dtype)
    optimizer = tf_dgc.DGCOptimizer(O.SGD(1.0, momentum=0.5), 0.99)
    optimizer.build([variable])
    wide = "float64" if dtype == "float64" else "float32"
    assert optimizer.residual[0].dtype == wide
    gradient = np.arange(1600).reshape(40, 40) / 1024
    optimizer.apply([tf.cast(gradient, dtype)], [variable])
    assert np.count_nonzero(variable.numpy()) == 16
    total = optimizer.residual[0].numpy() - np.asarray(variable.numpy(), wide)
    np.testing.assert_allclose(total, gradient, rtol=1e-2)


@pytest.mark.parametrize(
    "value_dtype", ["float32", "bfloat16", "float16", "sign", "mxint8", "mxfp4"]
)
def test_value_types(value_dtype):
    """They take fewer bytes, and rounding errors stay in the residual."""
    gradient = np.random.default_rng(0).normal(size=(100, 100)).astype("float32")
    sent_bytes = {}
    for name in (None, value_dtype):
        variable = keras.Variable(np.zeros((100, 100), "float32"))
        optimizer = tf_dgc.DGCOptimizer(O.SGD(1.0), 0.99, value_dtype=name)
        optimizer.build([variable])
        optimizer.apply([gradient], [variable])
        sent = -variable.numpy()
        assert np.count_nonzero(sent) == 100
        residual = optimizer.residual[0].numpy()
        np.testing.assert_allclose(sent + residual, gradient, rtol=0, atol=1e-6)
        sent_bytes[name] = optimizer.stats.bytes_per_step
    saved = {"float32": 0, "bfloat16": 200, "float16": 200, "sign": 400 - 20}
    saved |= {"mxint8": 300 - 4, "mxfp4": 400 - 52 - 4}  # scales fill a word
    assert sent_bytes[None] - sent_bytes[value_dtype] == saved[value_dtype]


@pytest.mark.parametrize("uncompressed_dtype", [None, "bfloat16", "mxint8"])
def test_uncompressed_tensors_are_coded(uncompressed_dtype):
    """They take fewer bytes, and rounding errors are sent later."""
    gradient = np.random.default_rng(0).normal(size=500).astype("float32")
    variable = keras.Variable(np.zeros(500, "float32"))
    optimizer = tf_dgc.DGCOptimizer(O.SGD(1.0), uncompressed_dtype=uncompressed_dtype)
    optimizer.build([variable])
    optimizer.apply([gradient], [variable])
    header = 20
    expected = {None: 2000, "bfloat16": 1000, "mxint8": 500 + 16}[uncompressed_dtype]
    assert optimizer.stats.bytes_per_step == header + expected
    residual = optimizer.residual[0].numpy()
    np.testing.assert_array_equal(residual - variable.numpy(), gradient)
    assert bool(np.any(residual)) == (uncompressed_dtype is not None)
    for _ in range(20):
        optimizer.apply([np.zeros_like(gradient)], [variable])
    np.testing.assert_allclose(-variable.numpy(), gradient, rtol=1e-6)
    restored = tf_dgc.DGCOptimizer.from_config(optimizer.get_config())
    assert restored.uncompressed_dtype == uncompressed_dtype


def test_variables_without_entries():
    variables = [keras.Variable(np.zeros(s, "float32")) for s in ((0, 5), (40, 40))]
    optimizer = tf_dgc.DGCOptimizer(O.SGD(1.0), 0.99, min_compress_size=0)
    optimizer.build(variables)
    optimizer.apply([tf.zeros((0, 5)), tf.ones((40, 40))], variables)
    assert optimizer.stats.entries_per_step == 16


def test_tiny_tensors_send_at_least_one_entry():
    variable = keras.Variable(np.zeros((2, 2), "float32"))
    optimizer = tf_dgc.DGCOptimizer(O.SGD(1.0), 0.999, min_compress_size=0)
    optimizer.build([variable])
    for _ in range(8):
        optimizer.apply([tf.ones((2, 2))], [variable])
    assert np.all(variable.numpy() < 0)  # every entry was sent


def test_all_zero_gradients_send_zeros():
    variable = keras.Variable(np.ones((50, 50), "float32"))
    optimizer = tf_dgc.DGCOptimizer(O.SGD(1.0, momentum=0.9), 0.99)
    optimizer.build([variable])
    optimizer.apply([tf.zeros((50, 50))], [variable])
    np.testing.assert_array_equal(variable.numpy(), 1)
    assert optimizer.stats.entries_per_step == 25


def test_within_a_loss_scale_optimizer():
    model = fit_model(
        O.LossScaleOptimizer(make_momentum_dgc(), initial_scale=16.0), shuffle=False
    )
    assert find_compressed_optimizer(model.optimizer).stats.steps == 8
    keras.utils.set_random_seed(0)
    plain = fit_model(make_momentum_dgc, shuffle=False)
    for scaled, reference in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(scaled, reference, rtol=1e-4, atol=1e-6)


def test_swap_ema_weights():
    inner = O.SGD(0.05, momentum=0.9, use_ema=True)
    swap = keras.callbacks.SwapEMAWeights()
    model = fit_model(tf_dgc.DGCOptimizer(inner, 0.9), callbacks=[swap])
    assert model.optimizer.inner_optimizer.use_ema


# --- state ----------------------------------------------------------------------------


def test_velocity_and_residual_are_optimizer_variables(strategies):
    model = fit_model(make_momentum_dgc, strategies[2])
    optimizer = model.optimizer
    variables = model.trainable_variables
    for state in (optimizer.velocity, optimizer.residual):
        assert [tuple(s.shape) for s in state] == [tuple(v.shape) for v in variables]
        assert all(isinstance(s, PerWorkerVariable) for s in state)
        assert all(any(s is v for v in optimizer.variables) for s in state)
    assert "residual" in optimizer.residual[0].path
    assert "residual" in repr(optimizer.residual[0])
    per_worker = strategies[2].experimental_local_results(optimizer.residual[0].value)
    assert np.any(per_worker[0].numpy() != per_worker[1].numpy())
    np.testing.assert_allclose(
        optimizer.residual[0].numpy(), sum(r.numpy() for r in per_worker), rtol=1e-6
    )


@pytest.mark.parametrize("kind", rows(["keras", "checkpoint", "weights"], ["keras"]))
def test_state_survives_saving(strategies, tmp_path, kind):
    """Also that of the inner optimizer; test_checkpoint.py has more."""
    strategy = strategies[2]
    model = fit_model(make_adam_dgc, strategy)
    again = restore(model, kind, strategy, tmp_path)
    assert isinstance(again.optimizer, tf_dgc.DGCOptimizer)
    before = {v.path: v.numpy() for v in model.optimizer.variables}
    after = [v.numpy() for v in again.optimizer.variables]
    assert len(before) == len(after)
    for (path, old), new in zip(before.items(), after, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-6, atol=1e-7, err_msg=path)
    assert np.any(again.optimizer.residual[0].numpy())
    again.fit(*make_data(), verbose=0)


def make_adam_dgc():
    return tf_dgc.DGCOptimizer(O.Adam(0.01), 0.9)


def restore(model, kind, strategy, tmp_path):
    if kind == "keras":
        model.save(tmp_path / "model.keras")
        with strategy.scope():
            return keras.models.load_model(tmp_path / "model.keras")
    with strategy.scope():
        again = make_model()
        again.compile(make_adam_dgc(), "mse")
        again.optimizer.build(again.trainable_variables)
    if kind == "weights":
        model.save_weights(tmp_path / "model.weights.h5")
        again.load_weights(tmp_path / "model.weights.h5")
        return again
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.write(str(tmp_path / "checkpoint"))
    target = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
    target.read(path).assert_existing_objects_matched()
    return again


def test_loading_state_of_other_settings_is_refused(tmp_path):
    model = fit_model(make_momentum_dgc)
    model.save_weights(tmp_path / "model.weights.h5")
    other = fit_model(lambda: tf_dgc.DGCOptimizer(O.SGD(0.05), 0.9))
    with pytest.raises(ValueError, match="Load with the settings"):
        other.load_weights(tmp_path / "model.weights.h5")


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: tf_dgc.DGCOptimizer("sgd"), "sparsity", 0.5),
        (lambda: tf_dgc.DGCOptimizer("sgd"), "value_dtype", "bfloat16"),
        (
            lambda: tf_dgc.DGCOptimizer("sgd"),
            "corrections",
            tf_dgc.Corrections(momentum=False),
        ),
        (lambda: tf_dgc.DGCOptimizer("sgd"), "collective", "tree"),
        (lambda: tf_dgc.CompressedOptimizer("sgd"), "compressor", "qsgd"),
        (lambda: tf_dgc.LocalOptimizer("sgd", 2), "period", 3),
        (lambda: tf_dgc.DGCOptimizer("sgd"), "momentum", 0.5),
        (lambda: tf_dgc.DGCOptimizer("adam"), "beta_1", 0.5),
    ],
)
def test_a_setting_without_effect_cannot_be_assigned(make, name, value):
    optimizer = make()
    before = optimizer.get_config()
    with pytest.raises(AttributeError, match=f"`{name}` .*Make another one"):
        setattr(optimizer, name, value)
    assert optimizer.get_config() == before


def test_settings_of_keras_and_new_attributes_can_be_assigned():
    optimizer = tf_dgc.DGCOptimizer("sgd")
    optimizer.learning_rate = 0.5
    optimizer.clipnorm = 1.0
    optimizer.user_attribute = 3
    assert (float(optimizer.learning_rate), optimizer.clipnorm) == (0.5, 1.0)
    assert optimizer.user_attribute == 3


@pytest.mark.parametrize("local", [False, True])
def test_xla_compiles_no_exchange(strategies, local):
    with strategies[2].scope():
        variable = keras.Variable(np.zeros((40, 50), "float32"))
        inner = keras.optimizers.SGD(0.1)
        optimizer = (
            tf_dgc.LocalOptimizer(inner, 2) if local else tf_dgc.DGCOptimizer(inner)
        )
        optimizer.build([variable])

    @tf.function(jit_compile=True)
    def step():
        optimizer.apply([tf.ones((40, 50))], [variable])

    with pytest.raises(ValueError, match="nothing that it can compile"):
        strategies[2].run(step)


def test_steps_are_traced_without_autograph():
    """AutoGraph would make tracing several times slower, without any use."""
    seen = []

    def schedule(step):
        if not tf.executing_eagerly():
            seen.append(tf.__internal__.autograph.control_status_ctx().status.name)
        return 0.5

    variable = keras.Variable(np.zeros((40, 50), "float32"))
    optimizer = tf_dgc.DGCOptimizer("sgd", schedule)
    optimizer.build([variable])
    seen.clear()
    tf.function(lambda: optimizer.apply([tf.ones((40, 50))], [variable]))()
    assert set(seen) == {"DISABLED"}
