"""Requirements that every registered method must satisfy.

`contract.VARIANTS` has further settings of some methods. Long tests always run with one
setting of every method, and with all in `pytest -m slow`. `tests/compressors/methods`
holds the tests of single methods.
"""

import functools
import itertools
import math
import pathlib
import random
import re
from typing import NamedTuple

import contract
import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, record_collectives
from selection import fewer, in_turn, rows

import tf_dgc
from tf_dgc import compressors
from tf_dgc.optimizers import validation
from tf_dgc.testing import Simulation

O = keras.optimizers  # noqa: E741
SHAPES = [(30, 40), (5, 4, 3, 7), (33, 1)]
EDGE_SHAPES = [(), (3,), (1, 9), (4, 1, 8)]
STEPS = 5 if Trainer.always_traced else 2


one_setting = pytest.mark.parametrize(
    "case", rows(contract.CASES, contract.ONE_EACH), indirect=True
)


# Long tests always run with a quarter of the methods; the rest is marked.
some_methods, more_methods, other_methods, last_methods = (
    pytest.mark.parametrize("case", rows(contract.CASES, always), indirect=True)
    for always in (contract.ONE_EACH[i::4] for i in range(4))
)


def has_state(case):
    compressor = contract.make_compressor(case)
    return bool(compressor.state((12, 20)) or compressor.common_state())


# Every method has a residual: one without further state is enough.
one_setting_with_state = pytest.mark.parametrize(
    "case",
    rows(
        contract.CASES,
        [
            case
            for case in contract.ONE_EACH
            if case.name == "top_k" or (has_state(case) and case.name != "lgc")
        ],
    ),
    indirect=True,
)


def one_setting_and(name, values, always=contract.ONE_EACH):
    """Parametrize by settings of methods and by `values`, which take turns."""
    parameters = in_turn(contract.CASES, values, always)
    return pytest.mark.parametrize(("case", name), parameters, indirect=["case"])


@pytest.fixture(params=contract.CASES, ids=str)
def case(request):
    return request.param


@pytest.fixture
def compressor(case):
    return contract.make_compressor(case)


def allows_error_feedback(compressor):
    return compressor.error_feedback != "forbidden"


def simulate(compressor, shapes=SHAPES, num_workers=2, dtype="float64", seed=0):
    feedback = allows_error_feedback(compressor) or None
    return Simulation(compressor, shapes, num_workers, dtype, feedback, seed)


# --- declarations ---------------------------------------------------------------------


def test_declarations(compressor):
    cls = type(compressor)
    assert compressors.METHODS[cls.name] is cls
    assert compressors.get(compressor) is compressor  # checks the rest
    assert cls.__doc__
    specs = {**compressor.state((30, 40)), **compressor.common_state()}
    for spec in specs.values():
        assert not (spec.per_worker and spec.initial)


def test_config_round_trip(compressor):
    copy = contract.round_trip(compressor)
    assert type(copy) is type(compressor)
    assert copy.get_config() == compressor.get_config()
    assert repr(copy) == repr(compressor)
    optimizer = tf_dgc.CompressedOptimizer(O.SGD(0.1), compressor)
    assert contract.round_trip(optimizer).get_config() == optimizer.get_config()


def test_get_by_name():
    for name, cls in compressors.METHODS.items():
        assert type(compressors.get(name)) is cls


# --- nothing is lost ------------------------------------------------------------------


class Step(NamedTuple):
    """Inputs and results of a step, by tensor, each summed over three workers."""

    gradients: list[np.ndarray]
    sums: list[np.ndarray]
    sent: list[np.ndarray]
    residuals: list[np.ndarray]
    tolerances: list[np.ndarray]


def over_workers(values):
    return [sum(column) for column in zip(*values, strict=True)]


@functools.cache
def three_workers(case, dtype, steps):
    """Return the steps of one simulation, which several tests share."""
    simulation = simulate(contract.make_compressor(case), num_workers=3, dtype=dtype)
    results = []
    for number in range(steps):
        gradients = contract.gradients(3, SHAPES, seed=number)
        results.append(
            Step(
                over_workers(gradients),
                simulation.step(gradients),
                over_workers(simulation.sent),
                over_workers(simulation.residual),
                contract.sum_tolerance(simulation),
            )
        )
    return results


@pytest.mark.parametrize(
    ("case", "dtype"),
    rows(
        itertools.product(contract.CASES, ["float32", "float64"]),
        itertools.product(contract.ONE_EACH[1::4], ["float64"]),
    ),
    indirect=["case"],
)
def test_sum_equals_the_contributions(compressor, case, dtype):
    if not compressor.additive:
        pytest.skip("no sum")
    for step in three_workers(case, dtype, 3 if dtype == "float32" else STEPS):
        for total, sent, tolerance in zip(
            step.sums, step.sent, step.tolerances, strict=True
        ):
            assert np.all(np.abs(total - sent) <= tolerance)


@more_methods
def test_error_feedback_conserves(compressor, case):
    """Sums plus residuals equal the sum of all gradients."""
    claims = compressor.additive and compressor.feedback_decay == 1
    if not (allows_error_feedback(compressor) and claims):
        pytest.skip("no claim")
    steps = three_workers(case, "float64", STEPS)
    for i, residual in enumerate(steps[-1].residuals):
        total = sum(s.sums[i] for s in steps)
        gradient = sum(s.gradients[i] for s in steps)
        tolerance = sum(s.tolerances[i] for s in steps)
        assert np.all(np.abs(total + residual - gradient) <= tolerance + 1e-13)


# --- claims of the papers -------------------------------------------------------------

DRAWS = 150
# Standard deviations: the error rate of one comparison is 6e-7, of the suite 1e-4.
DEVIATIONS = 5.0


@pytest.mark.slow
@one_setting
def test_unbiased(compressor, case):
    """The mean along several directions equals the input, to its standard error."""
    if not compressor.unbiased:
        pytest.skip("no claim")
    x = contract.SAMPLED.ravel()
    errors = contract.samples(case, DRAWS) - x
    rng = np.random.default_rng(2)
    for direction in (x, np.sign(x), np.ones(x.size), rng.normal(size=x.size)):
        along = errors @ direction
        limit = DEVIATIONS * along.std(ddof=1) / math.sqrt(DRAWS)
        assert abs(along.mean()) <= limit + 1e-12


@one_setting
def test_error_bound(compressor, case):
    x = contract.SAMPLED.ravel()
    bound = compressor.error_bound(x.size)
    if bound is None:
        pytest.skip("no claim")
    errors = np.sum((contract.samples(case, DRAWS) - x) ** 2, axis=1) / np.sum(x**2)
    limit = bound + DEVIATIONS * errors.std(ddof=1) / math.sqrt(DRAWS)
    assert errors.mean() <= limit + 1e-12


# --- the payload ----------------------------------------------------------------------


@one_setting_and("dtype", ["float32", "float64"], contract.ONE_EACH[::2])
def test_sends_the_stated_bytes(compressor, dtype):
    for shapes in (SHAPES, EDGE_SHAPES):
        simulation = simulate(compressor, shapes, dtype=dtype)
        simulation.step(contract.gradients(2, shapes))
        sent = [sum(map(contract.num_bytes, m)) for m in simulation.messages]
        assert sent == [simulation.sent_bytes] * 2
        tensors = shapes
        if compressor.entire_model:
            tensors = [(sum(map(math.prod, shapes)),)]
        stated = [compressor.bytes(s, tf.as_dtype(dtype)) for s in tensors]
        if None not in stated:
            extra = sum(map(contract.overhead, simulation.messages[0]))
            assert simulation.sent_bytes == sum(stated) + extra


# --- inputs ---------------------------------------------------------------------------

INPUTS = {
    "zero": lambda s, rng: np.zeros(s),
    "equal": lambda s, rng: np.full(s, -0.25),
    "huge": lambda s, rng: 1e30 * rng.normal(size=s),
    "tiny": lambda s, rng: 1e-30 * rng.normal(size=s),
    "one": lambda s, rng: np.eye(1, math.prod(s), math.prod(s) - 1).reshape(s),
    "mixed": lambda s, rng: rng.choice([0.0, 1e-20, 3.0, -1e20], size=s),
}


# Each part contains every shape and every input, in different pairs.
PAIRS = list(itertools.product(EDGE_SHAPES, INPUTS))
PARTS = [
    [p for i, p in enumerate(PAIRS) if (i + i // len(INPUTS)) % 4 == part]
    for part in range(4)
]


@pytest.mark.slow
@one_setting_and("part", range(4))
def test_edge_inputs(compressor, part):
    shapes, names = zip(*PARTS[part], strict=True)
    makers = [INPUTS[name] for name in names]
    simulation = simulate(compressor, shapes, dtype="float32")
    rng = np.random.default_rng(0)
    for _ in range(2):
        local = [
            [make(s, rng) for make, s in zip(makers, shapes, strict=True)]
            for _ in range(2)
        ]
        sums = simulation.step(local)
        for total, name in zip(sums, names, strict=True):
            assert np.all(np.isfinite(total)), name
            if name == "zero":
                assert not np.any(total)
    for worker in range(2):
        residual = simulation.residual[worker]
        states = [v for s in simulation.state[worker] for v in s.values()]
        assert all(np.all(np.isfinite(v)) for v in (*residual, *states))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", rows(contract.CASES, contract.ONE_EACH_THAT_MAY_MOVE), indirect=True
)
def test_rows_without_a_gradient_stay(compressor, case):
    """Rows of an embedding that no batch looked up stay bit-identical."""
    shapes = contract.SHAPES_WITH_ROWS
    simulation = simulate(compressor, shapes, dtype="float32")
    num_changed = 0
    for step in range(2):
        columns = [contract.gradients_with_idle_rows(2, s, step) for s in shapes]
        sums = simulation.step([list(local) for local in zip(*columns, strict=True)])
        num_changed += sum(np.count_nonzero(contract.idle_rows(t)) for t in sums)
    assert (num_changed > 0) == moves_idle_rows(case)


def test_methods_that_move_rows_without_a_gradient_are_documented():
    methods = {
        type(contract.make_compressor(c)) for c in contract.CASES if moves_idle_rows(c)
    }
    root = pathlib.Path(__file__).parents[2]
    text = (root / "docs/research/methods.md").read_text()
    table = text.partition("## Rows without a gradient")[2].partition("To keep")[0]
    documented = set(re.findall(r"`([A-Z]\w+)", table))
    # `GlobalTopK` sends the same entries as `TopK` of all tensors together.
    assert documented == {m.__name__ for m in methods} | {"GlobalTopK"}


def moves_idle_rows(case):
    return str(case) in contract.MOVES_IDLE_ROWS


# --- randomness -----------------------------------------------------------------------


@pytest.mark.slow
@some_methods
def test_deterministic_and_independent_of_global_seeds(compressor, case):
    expected = three_workers(case, "float64", STEPS)[: fewer(4)]
    simulation = simulate(compressor, num_workers=3)
    tf.random.set_seed(8)
    numbers = tf.random.uniform([4]).numpy()
    before = random.getstate(), np.random.get_state()[1].copy()
    tf.random.set_seed(8)
    for number, step in enumerate(expected):
        sums = simulation.step(contract.gradients(3, SHAPES, seed=number))
        for a, b in zip(sums, step.sums, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(tf.random.uniform([4]), numbers)
    assert random.getstate() == before[0]
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])


@pytest.mark.slow
@last_methods
def test_workers_round_independently(compressor, case):
    """With equal errors on all workers, the sum would be as noisy as one worker."""
    if compressor.aggregation == "sum" or not contract.draws_anything(case):
        pytest.skip("no random numbers, or the same ones for all workers")
    simulation = simulate(compressor)
    gradients = contract.gradients(1, SHAPES) * 2
    simulation.step(gradients)
    assert np.any(simulation.sent[0][0] != simulation.sent[1][0])


# --- in the optimizer -----------------------------------------------------------------

OPTIMIZED = [(12, 20), (3, 4, 10)]
RATE = 0.125  # exact in float32


def make_trainer(strategy, compressor, shapes=OPTIMIZED):
    feedback = allows_error_feedback(compressor) or None
    return Trainer(
        strategy,
        lambda: tf_dgc.CompressedOptimizer(
            O.SGD(RATE),
            compressor,
            error_feedback=feedback,
            min_compress_size=0,
            # Its bytes belong to no method: test_divergence.py.
            diagnostics=tf_dgc.Diagnostics(check_every=None),
        ),
        [np.zeros(s, "float32") for s in shapes],
    )


@pytest.fixture(scope="module")
def trainers():
    """Return a cache of trainers and their initial states, by case."""
    return {}


@pytest.fixture(scope="module")
def collective_sizes():
    """Return the list to which every collective's bytes are appended."""
    with pytest.MonkeyPatch.context() as patch:
        yield record_collectives(patch)


@pytest.fixture
def two_workers(strategies, trainers, collective_sizes, case):
    """Return a trainer in its initial state, except for the counts of its `stats`."""
    if case not in trainers:
        trainer = make_trainer(strategies[2], contract.make_compressor(case))
        start = trainer.save()
        trainer.step(contract.gradients(2, OPTIMIZED, "float32"))
        trainers[case] = trainer, start
    trainer, start = trainers[case]
    trainer.load(start)
    return trainer


@other_methods
def test_two_workers_equal_the_simulation(two_workers, collective_sizes, compressor):
    """Workers and bytes agree exactly; a non-finite gradient is skipped."""
    trainer = two_workers
    nonfinite = trainer.optimizer.stats.nonfinite
    simulation = simulate(compressor, OPTIMIZED, dtype="float32")
    expected = [np.zeros(s, "float32") for s in OPTIMIZED]
    for step in range(3):
        gradients = contract.gradients(2, OPTIMIZED, "float32", seed=step)
        finite = [list(local) for local in gradients]
        if step == 1:
            finite[0] = [np.zeros_like(g) for g in gradients[0]]
            gradients[0][1].flat[3] = np.nan
        collective_sizes.clear()
        trainer.step(gradients)
        sums = simulation.step(finite)
        assert sum(collective_sizes) == 2 * simulation.sent_bytes
        assert trainer.optimizer.stats.bytes_per_step == simulation.sent_bytes
        for copies in trainer.replica_weights():
            np.testing.assert_array_equal(copies[0], copies[1])
        expected = [w - RATE * s for w, s in zip(expected, sums, strict=True)]
        for weights, reference in zip(trainer.weights(), expected, strict=True):
            np.testing.assert_allclose(weights, reference, rtol=1e-4, atol=1e-5)
    assert trainer.optimizer.stats.nonfinite == nonfinite + 1
    for state in trainer.optimizer.variables:
        assert np.all(np.isfinite(state.numpy()))


@pytest.mark.parametrize(
    "case", rows(contract.CASES, contract.ONE_EACH[::4]), indirect=True
)
def test_traced_step_equals_the_eager_step(strategies, compressor):
    """They differ only in the order of sums."""
    results = []
    for traced in (False, True):
        trainer = make_trainer(strategies[1], compressor, shapes=OPTIMIZED[:1])
        run = tf.function(trainer._distributed) if traced else trainer._distributed
        for step in range(2):
            gradients = contract.gradients(1, OPTIMIZED[:1], "float32", seed=step)
            run(trainer.per_replica(gradients))
        results.append(trainer.weights()[0])
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)


@one_setting_with_state
def test_restart_from_a_checkpoint(strategies, compressor, tmp_path):
    def run(trainer, steps):
        for step in steps:
            gradients = contract.gradients(1, OPTIMIZED, "float32", seed=step)
            trainer._distributed(trainer.per_replica(gradients))

    def checkpoint(trainer):
        return tf.train.Checkpoint(
            weights=trainer.variables, optimizer=trainer.optimizer
        )

    whole, second = (make_trainer(strategies[1], compressor) for _ in range(2))
    run(whole, range(2))
    path = checkpoint(whole).write(str(tmp_path / "half"))
    run(whole, range(2, 4))
    status = checkpoint(second).read(path)
    status.assert_existing_objects_matched()
    run(second, range(2, 4))
    for a, b in zip(whole.weights(), second.weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(whole.optimizer.variables, second.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.slow
@one_setting_with_state
def test_goes_on_from_what_was_saved(strategies, two_workers, compressor):
    """Resumes bit for bit on two workers, and with the same total on one."""
    two = two_workers
    steps = [contract.gradients(2, OPTIMIZED, "float32", seed=i) for i in range(5)]
    for gradients in steps[:3]:
        two.step(gradients)
    saved = two.save()
    for gradients in steps[3:]:
        two.step(gradients)
    undisturbed = two.state()
    two.load(saved)
    for gradients in steps[3:]:
        two.step(gradients)
    for path, copies in two.state().items():
        for copy, expected in zip(copies, undisturbed[path], strict=True):
            np.testing.assert_array_equal(copy, expected, path)

    two.load(saved)
    one = make_trainer(strategies[1], compressor)
    one.load(saved)
    for residual, expected in zip(
        one.optimizer.residual, two.optimizer.residual, strict=True
    ):
        np.testing.assert_allclose(
            total_of(residual), total_of(expected), rtol=2**-23, atol=1e-30
        )
    before = one.weights()
    for gradients in steps[:3]:
        one.optimizer.apply(gradients[0], one.variables)
    assert all(np.all(np.isfinite(w)) for w in one.weights())
    assert np.any(one.weights()[0] != before[0])


def total_of(variable):
    """Return the sum over workers of every entry, in float64."""
    return variable.gather().astype("float64").sum(axis=0)


@one_setting_and("dtype", ["float16", "bfloat16", "float64"], contract.ONE_EACH[1::2])
def test_dtypes_of_variables(strategies, compressor, dtype):
    trainer = make_trainer(strategies[1], compressor)
    variables = [keras.Variable(np.zeros(s), dtype=dtype) for s in OPTIMIZED]
    optimizer = trainer.optimizer.from_config(trainer.optimizer.get_config())
    optimizer.build(variables)
    wide = "float64" if dtype == "float64" else "float32"
    assert {r.dtype for r in optimizer.residual} <= {wide}
    (gradients,) = contract.gradients(1, OPTIMIZED)
    for _ in range(2):  # some methods send nothing in the first step
        optimizer.apply([tf.cast(g, dtype) for g in gradients], variables)
    assert all(np.all(np.isfinite(np.asarray(v.numpy(), wide))) for v in variables)
    assert any(np.any(np.asarray(v.numpy(), wide)) for v in variables)


def test_forbidden_error_feedback_raises(compressor):
    invalid = {"required": False, "forbidden": True}
    for value in (True, False):
        if invalid.get(compressor.error_feedback) is value:
            with pytest.raises(ValueError, match="Error feedback is"):
                tf_dgc.CompressedOptimizer(O.SGD(0.1), compressor, error_feedback=value)
        else:
            assert validation.uses_error_feedback(compressor, value) is value
