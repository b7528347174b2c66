"""Adam correction compared with NumPy, across dense steps, and after loading."""

import keras
import numpy as np
import pytest
from adam_oracle import AdamaxOracle, AdamOracle, AmsgradOracle, NadamOracle
from contract import round_trip
from harness import SHAPES, Trainer, initial_weights, make_gradients
from selection import in_turn, rows

import tf_dgc
from tf_dgc.compressors import tie_offsets
from tf_dgc.optimizers import inner_hyperparameters
from tf_dgc.optimizers.adam_sampling import draw_positions

O = keras.optimizers  # noqa: E741
STEPS = 12
DENSE_FIRST = tf_dgc.schedules.PiecewiseConstantSparsity(
    [3, 5, 7, 8], [0.0, 0.9, 0.99, 0.0, 0.97]
)
TO_75_PERCENT = tf_dgc.schedules.PiecewiseConstantSparsity([4, 6], [0.0, 0.9, 0.75])
NEARLY_DENSE = tf_dgc.schedules.PiecewiseConstantSparsity([3], [0.25, 0.97])
RATE = O.schedules.ExponentialDecay(0.125, 3, 0.5)
CASES = {
    "adam": (lambda: O.Adam(0.125), {}),
    "adamw": (lambda: O.AdamW(0.125, weight_decay=0.1, beta_1=0.8, beta_2=0.9), {}),
    "no momentum": (lambda: O.Adam(0.125, beta_1=0.0, epsilon=0.5), {}),
    "rate": (lambda: O.AdamW(RATE, weight_decay=0.1), {"sparsity": DENSE_FIRST}),
    "rate when sent": (
        lambda: O.AdamW(RATE, weight_decay=0.1),
        {
            "sparsity": DENSE_FIRST,
            "corrections": tf_dgc.Corrections(scale_before_accumulation=False),
        },
    ),
    "costly": (lambda: O.Adam(0.125), {"sparsity": NEARLY_DENSE}),
    "masking": (
        lambda: O.Adam(0.125),
        {"corrections": tf_dgc.Corrections(factor_masking=True), "sparsity": 0.75},
    ),
    "momentum": (lambda: O.AdamW(0.125, weight_decay=0.1), {"sparsity": 0.8}),
    "momentum schedule": (lambda: O.Adam(0.125), {"sparsity": TO_75_PERCENT}),
    "schedule": (lambda: O.AdamW(0.125, weight_decay=0.1), {"sparsity": DENSE_FIRST}),
    "clipnorm": (lambda: O.Adam(0.125, global_clipnorm=5.0), {"sparsity": DENSE_FIRST}),
    "bfloat16": (lambda: O.Adam(0.125), {"value_dtype": "bfloat16"}),
    "amsgrad": (lambda: O.Adam(0.125, beta_2=0.6, amsgrad=True), {}),
    "adamax": (lambda: O.Adamax(0.125, beta_2=0.6), {}),
    "nadam": (lambda: O.Nadam(0.125, epsilon=0.1), {}),
    "nadam without momentum": (
        lambda: O.Nadam(0.125, beta_1=0.0, epsilon=0.1),
        {"sparsity": 0.9},
    ),
    "amsgrad schedule": (
        lambda: O.AdamW(0.125, beta_2=0.6, amsgrad=True),
        {"sparsity": DENSE_FIRST},
    ),
    "adamax schedule": (lambda: O.Adamax(0.125), {"sparsity": DENSE_FIRST}),
    "nadam schedule": (lambda: O.Nadam(0.125), {"sparsity": DENSE_FIRST}),
}
ORACLES = {O.Adamax: AdamaxOracle, O.Nadam: NadamOracle}


def make_trainer(strategy, case, dtype="float64"):
    make_inner, settings = CASES[case]
    settings = {"sparsity": 0.97, **settings}
    return Trainer(
        strategy,
        lambda: tf_dgc.DGCOptimizer(make_inner(), **settings),
        initial_weights(dtype),
    )


def make_oracle(num_workers, case, dtype="float64"):
    make_inner, settings = CASES[case]
    settings = {
        "sparsity": 0.97,
        "corrections": tf_dgc.Corrections(factor_masking=False),
        **settings,
    }
    schedule = settings["sparsity"]
    if callable(schedule):
        settings["sparsity"] = lambda step: float(schedule(step))
    share = schedule if not callable(schedule) else float(schedule(10**9))
    inner, weights = make_inner(), initial_weights(dtype)
    norm = inner.global_clipnorm
    kind = AmsgradOracle if getattr(inner, "amsgrad", False) else AdamOracle
    return ORACLES.get(type(inner), kind)(
        weights,
        num_workers,
        learning_rate=lambda step: float(RATE(step)) if "rate" in case else 0.125,
        beta_1=inner.beta_1,
        wait=share / (1 - share),
        beta_2=inner.beta_2,
        epsilon=inner.epsilon,
        weight_decay=inner.weight_decay or 0.0,
        clipping={"global_clipnorm": norm} if norm else {},
        positions=lambda step: _positions(weights, step),
        tie_offsets=lambda step: tie_offsets([w.size for w in weights], 0, step),
        **settings,
    )


def _positions(weights, step):
    """Return the sampled positions of compressed tensors, by index."""
    sampled = [i for i, w in enumerate(weights) if w.ndim > 1 and w.size >= 1024]
    drawn = draw_positions([weights[i].size for i in sampled], 0, step)
    return dict(zip(sampled, drawn.numpy(), strict=True))


def assert_close(values, expected):
    for a, b in zip(values, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "num_workers"),
    rows(
        [(case, n) for case in CASES for n in (1, 2, 3)],
        [
            ("adamw", 1),
            ("schedule", 3),
            ("costly", 3),
            ("momentum", 2),
        ],
    ),
)
def test_matches_numpy(strategies, case, num_workers):
    trainer = make_trainer(strategies[num_workers], case)
    oracle = make_oracle(num_workers, case)
    for gradients in make_gradients(num_workers, STEPS):
        trainer.step(gradients)
        oracle.step(gradients)
        assert_close(trainer.weights(), oracle.weights)
    optimizer = trainer.optimizer
    for i, shape in enumerate(SHAPES):
        if len(shape) > 1 and np.prod(shape) >= 1024:
            states = {
                "residual": [w.residual[i] for w in oracle.workers],
                "second_moment": [w.moments[i][0] for w in oracle.workers],
                "largest_moment": [w.moments[i][-1] for w in oracle.workers],
            }
            for name, expected in states.items():
                if variables := getattr(optimizer, name):
                    local = [worker[i] for worker in trainer.local(variables)]
                    assert_close(local, expected)


@pytest.mark.parametrize(("case", "num_workers"), [("schedule", 2), ("costly", 3)])
def test_dense_steps_are_those_of_the_inner_optimizer(strategies, case, num_workers):
    """Also with a sparse schedule, if a dense step costs less."""
    make_inner, _ = CASES[case]
    alone = Trainer(strategies[num_workers], make_inner, initial_weights("float32"))
    wrapped = make_trainer(strategies[num_workers], case, "float32")
    for gradients in make_gradients(num_workers, 3, "float32"):
        alone.step(gradients)
        wrapped.step(gradients)
    assert_close(wrapped.weights(), alone.weights())
    assert not any(np.any(v.numpy()) for v in wrapped.optimizer.second_moment)


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: tf_dgc.DGCOptimizer(
            inner, 0.97, corrections=tf_dgc.Corrections(adam=False)
        ),
        lambda inner: tf_dgc.CompressedOptimizer(
            inner, "top_k", corrections=tf_dgc.Corrections(adam=False)
        ),
        lambda inner: tf_dgc.CompressedOptimizer(inner, "none"),
        lambda inner: tf_dgc.CompressedOptimizer(inner, "top_k", error_feedback=False),
    ],
    ids=["dgc", "compressed", "lossless", "no feedback"],
)
def test_without_correction_the_rule_is_applied_to_the_sum(make):
    optimizer = make(O.Adam(0.125))
    optimizer.build([keras.Variable(np.zeros((40, 50), "float32"))])
    assert optimizer.velocity == optimizer.second_moment == []


@pytest.mark.parametrize("inner", [O.RMSprop, O.Lamb])
def test_other_rules_are_not_corrected(inner):
    with pytest.warns(UserWarning, match="trains badly with"):
        optimizer = tf_dgc.DGCOptimizer(inner(), 0.97)
    optimizer.build([keras.Variable(np.zeros((40, 50), "float32"))])
    assert optimizer.velocity == optimizer.second_moment == []


@pytest.mark.parametrize("masking", [None, True, False])
@pytest.mark.parametrize("correction", [True, False])
def test_config_round_trip(masking, correction):
    optimizer = tf_dgc.DGCOptimizer(
        O.AdamW(0.01),
        corrections=tf_dgc.Corrections(factor_masking=masking, adam=correction),
    )
    again = round_trip(optimizer)
    assert again.corrections.adam is correction
    assert again.corrections.factor_masking is masking
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize(
    "method", rows(["top_k", "ef_sign_sgd", "power_sgd", "one_bit"], ["top_k"])
)
def test_delayed_entries_move_as_far_as_others(method):
    """With a constant gradient, an entry's progress does not depend on its delay."""
    variable = keras.Variable(np.zeros((40, 50), "float32"))
    settings = {"sparsity": 0.9} if method == "top_k" else {}
    compressor = tf_dgc.compressors.METHODS[method](**settings)
    optimizer = tf_dgc.CompressedOptimizer(O.Adam(0.01), compressor)
    rng = np.random.default_rng(0)
    gradient = rng.uniform(0.5, 2.0, (40, 50)) * 10.0 ** rng.integers(-3, 3, (40, 1))
    for _ in range(100):
        optimizer.apply([gradient.astype("float32")], [variable])
    distances = -variable.numpy() / 0.01
    assert 75 < distances.mean() < 101
    assert distances.std() < 25


@pytest.mark.parametrize(
    "make",
    rows([lambda: O.Adam(0.01, amsgrad=True), O.Adamax, O.Nadam], []),
)
def test_delayed_entries_move_as_far_with_adams_variants(make):
    inner = make()
    inner.learning_rate = 0.01
    variable = keras.Variable(np.zeros((40, 50), "float32"))
    optimizer = tf_dgc.DGCOptimizer(inner, 0.9)
    gradient = np.random.default_rng(0).uniform(0.5, 2.0, (40, 50)).astype("float32")
    for _ in range(100):
        optimizer.apply([gradient], [variable])
    distances = -variable.numpy() / 0.01
    assert 75 < distances.mean() < 101
    assert distances.std() < 25


def rare_row(seen, step):
    """Return a gradient of one row; in step 50, if `seen`, also of row 99.

    The second moment of row 99 is 0 until then.
    """
    rows = [step % 7, 99] if seen and step == 50 else [step % 7]
    return np.where(np.isin(np.arange(100), rows)[:, np.newaxis], 1e-3, 0) + [0.0] * 20


def test_the_correlation_does_not_depend_on_the_learning_rate(strategies):
    falling = O.schedules.PiecewiseConstantDecay([6], [0.1, 1e-4])
    factors = []
    for rate in (0.1, falling):
        trainer = Trainer(
            strategies[2],
            lambda rate=rate: tf_dgc.DGCOptimizer(O.Adam(rate), 0.97),
            initial_weights("float32"),
        )
        for step, gradients in enumerate(make_gradients(2, STEPS, "float32")):
            trainer.step([gradients[0], gradients[0 if step < 6 else 1]])
        factors.append(trainer.optimizer.state.adam._correlation.factors().numpy())
    np.testing.assert_allclose(*factors, rtol=1e-5)
    assert np.all(factors[0] < 4)  # 4 while the gradients were equal


def test_a_negative_rate_moves_in_the_opposite_direction(strategies):
    distances = []
    for rate in (0.01, -0.01):
        before = initial_weights("float32")
        trainer = Trainer(
            strategies[1],
            lambda rate=rate: tf_dgc.DGCOptimizer(O.Adam(rate), 0.97),
            before,
        )
        for gradients in make_gradients(1, 4, "float32"):
            trainer.step(gradients)
        distances.append(
            [a - b for a, b in zip(trainer.weights(), before, strict=True)]
        )
    for forward, backward in zip(*distances, strict=True):
        assert np.any(forward)
        np.testing.assert_allclose(forward, -backward, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_rare_rows_make_no_giant_steps(strategies, num_workers):
    """A row that only one of N workers sees may move N times less."""
    zeros = [np.zeros((100, 20), "float32")]
    strategy = strategies[num_workers]
    wrapped = Trainer(strategy, lambda: tf_dgc.DGCOptimizer(O.Adam(0.01), 0.9), zeros)
    alone = Trainer(strategy, lambda: O.Adam(0.01), zeros)
    for step in range(60):
        gradients = [
            [(rare_row(worker == 0, step) / num_workers).astype("float32")]
            for worker in range(num_workers)
        ]
        for trainer in (wrapped, alone):
            trainer.step(gradients)
    distance, stock = (np.abs(t.weights()[0][99]).max() for t in (wrapped, alone))
    assert 0.9 / num_workers * stock < distance < 4 * stock


@pytest.mark.parametrize("large", [1e30, np.inf, np.nan])
def test_a_huge_entry_does_not_spread(large):
    variable = keras.Variable(np.zeros((40, 50), "float32"))
    optimizer = tf_dgc.DGCOptimizer(O.Adam(0.01), 0.9)
    gradient = np.random.default_rng(0).normal(size=(40, 50)).astype("float32")
    spoiled = gradient.copy()
    spoiled[0, 0] = large
    for step in range(10):
        optimizer.apply([spoiled if step == 5 else gradient], [variable])
    assert np.isfinite(optimizer.second_moment[0].numpy()).all()
    assert np.abs(variable.numpy()).max() < 0.2


@pytest.mark.parametrize(
    ("num_steps", "case"),
    [
        *in_turn([2, 6], ["schedule", "adamw"], [2]),
        *rows([(6, f"{kind} schedule") for kind in ("amsgrad", "nadam", "adamax")], []),
    ],
)
def test_resumes_from_saved_state(strategies, case, num_steps):
    steps = make_gradients(2, 9, "float32")
    first, second = (make_trainer(strategies[2], case, "float32") for _ in range(2))
    for gradients in steps[:num_steps]:
        first.step(gradients)
    second.load(first.save())
    for gradients in steps[num_steps:]:
        first.step(gradients)
        second.step(gradients)
    for weight, expected in zip(second.weights(), first.weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_another_number_of_workers_gets_the_largest_moment_of_an_adamax(strategies):
    """Synchronization takes the maximum too, so that a mean would not last."""
    two, three = (make_trainer(strategies[n], "adamax") for n in (2, 3))
    for gradients in make_gradients(2, 3):
        two.step(gradients)
    three.load(two.save())
    moments = [t.optimizer.second_moment for t in (two, three)]
    differ = False
    for old, new in zip(*moments, strict=True):
        largest = old.gather().max(axis=0)
        differ |= np.any(largest != old.gather()[0])  # uncompressed tensors have none
        np.testing.assert_array_equal(new.gather(), [largest] * 3)
    assert differ


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_gets_the_mean_of_the_second_moments(
    strategies, workers
):
    """The next step equals NumPy's, from shares of the saved state."""
    two, others = (make_trainer(strategies[n], "amsgrad") for n in (2, workers))
    before, after = (make_oracle(n, "amsgrad") for n in (2, workers))
    for gradients in make_gradients(2, 3):
        two.step(gradients)
        before.step(gradients)
    others.load(two.save())
    after.take_over(before)
    for name in ("second_moment", "largest_moment"):
        mean = np.mean(getattr(two.optimizer, name)[0].gather(), axis=0)
        for local in others.local(getattr(others.optimizer, name)):
            np.testing.assert_allclose(local[0], mean, rtol=1e-6)
    (gradients,) = make_gradients(workers, 1, seed=3)
    others.step(gradients)
    after.step(gradients)
    assert_close(others.weights(), after.weights)


@pytest.mark.parametrize(
    ("compressor", "delay", "remaining"),
    [
        (tf_dgc.compressors.TopK(0.5), 1, 8 / 9),
        (tf_dgc.compressors.TopK(0.75), 3, 6 / 7),
        (tf_dgc.compressors.TopK(0.9), 9, 0),
        (tf_dgc.compressors.TopK(tf_dgc.schedules.WarmupSparsity(100)), 999, 0),
        (tf_dgc.compressors.ChunkedTopK(8, 2), 3, 6 / 7),
        (tf_dgc.compressors.EFSignSGD(), 0, 0.9),
    ],
)
def test_delay_replaces_a_part_of_the_momentum(compressor, delay, remaining):
    assert compressor.mean_delay == pytest.approx(delay)
    momentum = inner_hyperparameters.remaining_momentum(0.9, delay)
    assert momentum == pytest.approx(remaining)
    optimizer = tf_dgc.CompressedOptimizer(O.Adam(), compressor)
    optimizer.build([keras.Variable(np.zeros((40, 50), "float32"))])
    assert bool(optimizer.velocity) == bool(remaining)
    assert inner_hyperparameters.remaining_momentum(0.0, delay) == 0
