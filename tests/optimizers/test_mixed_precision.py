"""Mixed precision: all workers skip a step if one of them overflows."""

import functools

import keras
import numpy as np
import pytest
from harness import Trainer, initial_weights, make_gradients
from selection import rows

import tf_dgc
from tf_dgc.callbacks import find_compressed_optimizer

SGD = keras.optimizers.SGD
AdamW = keras.optimizers.AdamW
GROWTH_STEPS = 3
# Which workers' gradients overflow, by step.
OVERFLOWS = {1: [0], 4: [1], 5: [1], 9: [0, 1]}
STEPS = 12
INNERS = {
    "dense": lambda: SGD(0.25, momentum=0.5),
    "sparsity 0": lambda: tf_dgc.DGCOptimizer(SGD(0.25, momentum=0.5), 0.0),
    "dgc": lambda: tf_dgc.DGCOptimizer(SGD(0.25, momentum=0.5), 0.97),
    "adam": lambda: tf_dgc.DGCOptimizer(keras.optimizers.Adam(0.25), 0.97),
    "power_sgd": lambda: tf_dgc.CompressedOptimizer(SGD(0.25), "power_sgd"),
    "dense adamw": lambda: AdamW(0.125),
    "sparsity 0, adamw": lambda: tf_dgc.DGCOptimizer(AdamW(0.125), 0.0),
}
# Inner optimizers of models.
MODELS = {
    "sgd": lambda: SGD(0.01, momentum=0.9),
    "adamw": lambda: AdamW(0.01),
    "amsgrad": lambda: AdamW(0.01, amsgrad=True),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
}


def make_trainer(strategy, inner):
    tf_dgc.prepare(strategy)
    return Trainer(
        strategy,
        lambda: keras.optimizers.LossScaleOptimizer(
            INNERS[inner](), initial_scale=16.0, dynamic_growth_steps=GROWTH_STEPS
        ),
        initial_weights("float32"),
    )


def overflowing_gradients(num_workers):
    steps = make_gradients(num_workers, STEPS, "float32")
    for step, workers in OVERFLOWS.items():
        for worker in set(workers) & set(range(num_workers)):
            steps[step][worker][2][3, 4] = np.inf
    return steps


def overflowed(gradients):
    return not all(np.all(np.isfinite(g)) for local in gradients for g in local)


def expected_scales(steps):
    """Return loss scale and steps since it changed, after each step."""
    scale, counter = 16.0, 0
    for gradients in steps:
        counter += 1
        if overflowed(gradients):
            scale, counter = scale / 2, 0
        elif counter == GROWTH_STEPS:
            scale, counter = scale * 2, 0
        yield scale, counter


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("inner", INNERS)
def test_the_scale_moves_and_steps_are_skipped_on_all_workers(
    strategies, inner, num_workers
):
    """Also with stock SGD, although Keras looks at the first replica only."""
    trainer = make_trainer(strategies[num_workers], inner)
    optimizer = trainer.optimizer
    steps = overflowing_gradients(num_workers)
    num_steps = 0
    for gradients, (scale, counter) in zip(steps, expected_scales(steps), strict=True):
        before = trainer.weights()
        trainer.step(gradients)
        num_steps += not overflowed(gradients)
        for variable, value in [
            (optimizer.dynamic_scale, scale),
            (optimizer.step_counter, counter),
            (optimizer.iterations, num_steps),
        ]:
            copies = trainer.strategy.experimental_local_results(variable.value)
            assert [c.numpy() for c in copies] == [value] * num_workers
        for copies, old in zip(trainer.replica_weights(), before, strict=True):
            assert len({c.tobytes() for c in copies}) == 1
            assert np.array_equal(copies[0], old) == overflowed(gradients)
    assert 0 < num_steps < STEPS


@pytest.mark.parametrize(
    ("num_workers", "inner", "outer"),
    [
        (1, "dense", "sparsity 0"),
        (2, "dense", "sparsity 0"),
        (2, "dense adamw", "sparsity 0, adamw"),
    ],
)
def test_sparsity_0_equals_the_dense_run(strategies, num_workers, inner, outer):
    dense = make_trainer(strategies[num_workers], inner)
    wrapped = make_trainer(strategies[num_workers], outer)
    for gradients in overflowing_gradients(num_workers):
        dense.step(gradients)
        wrapped.step(gradients)
        for weight, expected in zip(wrapped.weights(), dense.weights(), strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("inner", ["dgc", "adam", "power_sgd"])
def test_a_skipped_step_does_not_change_the_state(strategies, inner):
    trainer = make_trainer(strategies[2], inner)
    compressed = find_compressed_optimizer(trainer.optimizer)
    num_steps = 0
    for gradients in overflowing_gradients(2):
        before = local_state(trainer, compressed)
        trainer.step(gradients)
        after = local_state(trainer, compressed)
        same = all(map(np.array_equal, before, after))
        assert same == overflowed(gradients)
        num_steps += not overflowed(gradients)
        assert compressed.stats.steps == num_steps
    assert compressed.stats.nonfinite == 0


def local_state(trainer, optimizer):
    variables = [*optimizer.velocity, *optimizer.residual, *optimizer.second_moment]
    return [a for worker in trainer.local(variables) for a in worker]


# --- models ---------------------------------------------------------------------------


@pytest.fixture
def policy():
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


def make_model(strategy, optimizer, **settings):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((20,)), keras.layers.Dense(30), keras.layers.Dense(1)]
        )
        model.compile(optimizer(), "mse", **settings)
    return model


def make_data(bad=None, value=1e30):
    """Return 48 examples; the target of number `bad` overflows in float16."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 20)).astype("float32")
    y = x[:, :1].copy()
    if bad is not None:
        y[bad] = value
    return x, y


def dgc(inner="sgd"):
    return tf_dgc.DGCOptimizer(MODELS[inner](), 0.9, min_compress_size=100)


@pytest.mark.parametrize(
    ("bad", "steps_per_execution", "inner"),
    rows(
        [(3, 1, "sgd"), (7, 1, "sgd"), *((7, 3, inner) for inner in MODELS)],
        [(7, 3, "adamw")],
    ),
)
def test_fit_adds_a_loss_scale(strategies, policy, bad, steps_per_execution, inner):
    """A batch of 8 is halved between the replicas, and one example overflows."""
    policy("mixed_float16")
    make = functools.partial(dgc, inner)
    model = make_model(strategies[2], make, steps_per_execution=steps_per_execution)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = make_data(bad)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert model.optimizer.dynamic_scale.numpy() == 2**14
    assert model.optimizer.iterations.numpy() == 5
    assert find_compressed_optimizer(model.optimizer).stats.steps == 5
    assert all(np.all(np.isfinite(w)) for w in model.get_weights())


def test_a_custom_loop_of_eager_steps(strategies):
    trainer = make_trainer(strategies[2], "dgc")
    trainer._run = trainer._distributed
    for step, gradients in enumerate(overflowing_gradients(2)[:5]):
        trainer.step(gradients)
        assert trainer.optimizer.iterations.numpy() == [1, 1, 2, 3, 3][step]
    assert trainer.optimizer.dynamic_scale.numpy() == 4


@pytest.mark.parametrize("inner", rows([*MODELS], ["sgd"]))
def test_save_and_load(strategies, policy, tmp_path, inner):
    policy("mixed_float16")
    model = make_model(strategies[2], functools.partial(dgc, inner))
    model.fit(*make_data(7), batch_size=8, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    with strategies[2].scope():
        again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, keras.optimizers.LossScaleOptimizer)
    pairs = zip(model.optimizer.variables, again.optimizer.variables, strict=True)
    for old, new in pairs:
        np.testing.assert_allclose(
            new.numpy(), old.numpy(), rtol=1e-6, err_msg=new.path
        )
    for m in (model, again):
        m.fit(*make_data(), batch_size=8, shuffle=False, verbose=0)
    assert again.optimizer.dynamic_scale.numpy() == 2**14
    assert again.optimizer.iterations.numpy() == 11


@pytest.mark.parametrize("inner", rows([*MODELS], ["sgd", "adamw"]))
def test_bfloat16_has_no_loss_scale_and_skips_one_worker(strategies, policy, inner):
    policy("mixed_bfloat16")
    model = make_model(strategies[2], functools.partial(dgc, inner))
    assert isinstance(model.optimizer, tf_dgc.DGCOptimizer)
    model.fit(*make_data(7, np.inf), batch_size=8, shuffle=False, verbose=0)
    assert model.optimizer.iterations.numpy() == 6
    assert model.optimizer.stats.nonfinite == 1
    assert all(np.all(np.isfinite(w)) for w in model.get_weights())
