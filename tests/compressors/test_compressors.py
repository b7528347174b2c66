"""The contract: what every registered method must satisfy.

A method is in it by being registered; `contract.VARIANTS` has more settings of some.
What takes long runs always with one setting of every method, and with all in
`pytest -m slow`. What only one method does is in `tests/compressors/methods`.
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


# Of what takes long, a method runs one or two always, the rest is `slow`.
some_methods, more_methods, other_methods, last_methods = (
    pytest.mark.parametrize("case", rows(contract.CASES, always), indirect=True)
    for always in (contract.ONE_EACH[i::4] for i in range(4))
)


def keeps_more_than_a_residual(case):
    compressor = contract.make(case)
    return bool(compressor.state((12, 20)) or compressor.common_state())


# What all keep is the residual, which one method shows; the others are `slow`.
one_setting_with_state = pytest.mark.parametrize(
    "case",
    rows(
        contract.CASES,
        [
            case
            for case in contract.ONE_EACH
            if case.name == "top_k"
            or (keeps_more_than_a_residual(case) and case.name != "lgc")
        ],
    ),
    indirect=True,
)


def one_setting_and(name, values, always=contract.ONE_EACH):
    """Parametrize by settings of methods and by `values`, which take turns."""
    choice = in_turn(contract.CASES, values, always)
    return pytest.mark.parametrize(("case", name), choice, indirect=["case"])


@pytest.fixture(params=contract.CASES, ids=str)
def case(request):
    return request.param


@pytest.fixture
def compressor(case):
    return contract.make(case)


def keeps_what_is_not_sent(compressor):
    return compressor.error_feedback != "forbidden"


def simulate(compressor, shapes=SHAPES, num_workers=2, dtype="float64", seed=0):
    feedback = keeps_what_is_not_sent(compressor) or None
    return Simulation(compressor, shapes, num_workers, dtype, feedback, seed)


# --- what it says of itself -----------------------------------------------------------


def test_facts(compressor):
    cls = type(compressor)
    assert compressors.METHODS[cls.name] is cls
    assert compressors.get(compressor) is compressor  # checks the rest
    assert cls.__doc__
    specs = {**compressor.state((30, 40)), **compressor.common_state()}
    for spec in specs.values():
        assert not (spec.per_worker and spec.initial)


def test_config_round_trip(compressor):
    again = contract.round_trip(compressor)
    assert type(again) is type(compressor)
    assert again.get_config() == compressor.get_config()
    assert repr(again) == repr(compressor)
    optimizer = tf_dgc.CompressedOptimizer(O.SGD(0.1), compressor)
    assert contract.round_trip(optimizer).get_config() == optimizer.get_config()


def test_found_by_name():
    for name, cls in compressors.METHODS.items():
        assert type(compressors.get(name)) is cls


# --- nothing is lost ------------------------------------------------------------------


class Step(NamedTuple):
    """What a step of three workers was given and gave, by tensor, summed over them."""

    given: list[np.ndarray]
    sums: list[np.ndarray]
    sent: list[np.ndarray]
    kept: list[np.ndarray]
    tolerances: list[np.ndarray]


def over_workers(values):
    return [sum(column) for column in zip(*values, strict=True)]


@functools.cache
def three_workers(case, dtype, steps):
    """Return the `Step`s of one simulation, for several tests to look at."""
    simulation = simulate(contract.make(case), num_workers=3, dtype=dtype)
    found = []
    for number in range(steps):
        gradients = contract.gradients(3, SHAPES, seed=number)
        found.append(
            Step(
                over_workers(gradients),
                simulation.step(gradients),
                over_workers(simulation.sent),
                over_workers(simulation.residual),
                contract.sum_tolerance(simulation),
            )
        )
    return found


@pytest.mark.parametrize(
    ("case", "dtype"),
    rows(
        itertools.product(contract.CASES, ["float32", "float64"]),
        itertools.product(contract.ONE_EACH[1::4], ["float64"]),
    ),
    indirect=["case"],
)
def test_what_arrives_is_what_was_sent(compressor, case, dtype):
    if not compressor.additive:
        pytest.skip("no sum")
    for step in three_workers(case, dtype, 3 if dtype == "float32" else STEPS):
        for total, sent, tolerance in zip(
            step.sums, step.sent, step.tolerances, strict=True
        ):
            assert np.all(np.abs(total - sent) <= tolerance)


@more_methods
def test_error_feedback_conserves(compressor, case):
    """All that arrived, and all that is kept, is all there ever was."""
    claims = compressor.additive and compressor.feedback_decay == 1
    if not (keeps_what_is_not_sent(compressor) and claims):
        pytest.skip("no claim")
    steps = three_workers(case, "float64", STEPS)
    for i, kept in enumerate(steps[-1].kept):
        arrived, given = sum(s.sums[i] for s in steps), sum(s.given[i] for s in steps)
        tolerance = sum(s.tolerances[i] for s in steps)
        assert np.all(np.abs(arrived + kept - given) <= tolerance + 1e-13)


# --- what the paper claims ------------------------------------------------------------

DRAWS = 150
# Of a normal variable; the error rate of one comparison is 6e-7, of the suite 1e-4.
DEVIATIONS = 5.0


@pytest.mark.slow
@one_setting
def test_unbiased(compressor, case):
    """The mean along several directions is that of the input, to its standard error."""
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
def test_sends_what_it_states(compressor, dtype):
    for shapes in (SHAPES, EDGE_SHAPES):
        simulation = simulate(compressor, shapes, dtype=dtype)
        simulation.step(contract.gradients(2, shapes))
        sent = [sum(map(contract.num_bytes, m)) for m in simulation.messages]
        assert sent == [simulation.sent_bytes] * 2
        seen = [(sum(map(math.prod, shapes)),)] if compressor.entire_model else shapes
        stated = [compressor.bytes(s, tf.as_dtype(dtype)) for s in seen]
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


# Every shape and every input is in each part, in other pairs.
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
        kept = simulation.residual[worker]
        states = [v for s in simulation.state[worker] for v in s.values()]
        assert all(np.all(np.isfinite(v)) for v in (*kept, *states))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", rows(contract.CASES, contract.ONE_EACH_THAT_MAY_MOVE), indirect=True
)
def test_rows_without_a_gradient_stay(compressor, case):
    """Such as those of an embedding that no batch looked up, bit for bit."""
    shapes = contract.SHAPES_WITH_ROWS
    simulation = simulate(compressor, shapes, dtype="float32")
    moved = 0
    for step in range(2):
        columns = [contract.gradients_with_idle_rows(2, s, step) for s in shapes]
        sums = simulation.step([list(local) for local in zip(*columns, strict=True)])
        moved += sum(np.count_nonzero(contract.idle_rows(total)) for total in sums)
    assert (moved > 0) == moves_idle_rows(case)


def test_what_moves_rows_without_a_gradient_is_documented():
    methods = {type(contract.make(c)) for c in contract.CASES if moves_idle_rows(c)}
    root = pathlib.Path(__file__).parents[2]
    text = (root / "docs" / "methods.md").read_text()
    table = text.partition("## Rows without a gradient")[2].partition("To keep")[0]
    documented = set(re.findall(r"`([A-Z]\w+)", table))
    # The latter takes the same entries of all tensors together.
    assert documented == {m.__name__ for m in methods} | {"GlobalTopK"}


def moves_idle_rows(case):
    return str(case) in contract.MOVES_IDLE_ROWS


# --- randomness -----------------------------------------------------------------------


@pytest.mark.slow
@some_methods
def test_deterministic_and_apart_from_global_seeds(compressor, case):
    expected = three_workers(case, "float64", STEPS)[: fewer(4)]
    simulation = simulate(compressor, num_workers=3)
    tf.random.set_seed(8)
    drawn = tf.random.uniform([4]).numpy()
    before = random.getstate(), np.random.get_state()[1].copy()
    tf.random.set_seed(8)
    for number, step in enumerate(expected):
        again = simulation.step(contract.gradients(3, SHAPES, seed=number))
        for a, b in zip(again, step.sums, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(tf.random.uniform([4]), drawn)
    assert random.getstate() == before[0]
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])


@pytest.mark.slow
@last_methods
def test_workers_round_for_themselves(compressor, case):
    """With the same errors on all workers, their sum would be as noisy as one."""
    if compressor.aggregation == "sum" or not contract.draws_anything(case):
        pytest.skip("nothing is drawn, or by all together")
    simulation = simulate(compressor)
    gradients = contract.gradients(1, SHAPES) * 2
    simulation.step(gradients)
    assert np.any(simulation.sent[0][0] != simulation.sent[1][0])


# --- in the optimizer -----------------------------------------------------------------

OPTIMIZED = [(12, 20), (3, 4, 10)]
RATE = 0.125  # exact in float32


def make_trainer(strategy, compressor, shapes=OPTIMIZED):
    feedback = keeps_what_is_not_sent(compressor) or None
    return Trainer(
        strategy,
        lambda: tf_dgc.CompressedOptimizer(
            O.SGD(RATE),
            compressor,
            error_feedback=feedback,
            min_compress_size=0,
            # Its bytes are no method's: test_divergence.py.
            diagnostics=tf_dgc.Diagnostics(check_every=None),
        ),
        [np.zeros(s, "float32") for s in shapes],
    )


@pytest.fixture(scope="module")
def made():
    """Return what is made, and may be traced, once for all tests, by case."""
    return {}


@pytest.fixture(scope="module")
def handed_over():
    """Return the list to which every collective's bytes are appended."""
    with pytest.MonkeyPatch.context() as patch:
        yield record_collectives(patch)


@pytest.fixture
def two_workers(strategies, made, handed_over, case):
    """Return a trainer as if it was new but for what its `stats` have counted."""
    if case not in made:
        trainer = make_trainer(strategies[2], contract.make(case))
        start = trainer.save()
        trainer.step(contract.gradients(2, OPTIMIZED, "float32"))
        made[case] = trainer, start
    trainer, start = made[case]
    trainer.load(start)
    return trainer


@other_methods
def test_two_workers_are_the_simulation(two_workers, handed_over, compressor):
    """Bit-identical workers, measured bytes, and a non-finite gradient left out."""
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
        handed_over.clear()
        trainer.step(gradients)
        sums = simulation.step(finite)
        assert sum(handed_over) == 2 * simulation.sent_bytes
        assert trainer.optimizer.stats.bytes_per_step == simulation.sent_bytes
        for copies in trainer.replica_weights():
            np.testing.assert_array_equal(copies[0], copies[1])
        expected = [w - RATE * s for w, s in zip(expected, sums, strict=True)]
        for mine, reference in zip(trainer.weights(), expected, strict=True):
            np.testing.assert_allclose(mine, reference, rtol=1e-4, atol=1e-5)
    assert trainer.optimizer.stats.nonfinite == nonfinite + 1
    for state in trainer.optimizer.variables:
        assert np.all(np.isfinite(state.numpy()))


@pytest.mark.parametrize(
    "case", rows(contract.CASES, contract.ONE_EACH[::4]), indirect=True
)
def test_a_step_can_be_traced(strategies, compressor):
    """To the same, but for the order of sums."""
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
    """On two workers bit for bit, on one with the same total, and trains on."""
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
    for kept, expected in zip(
        one.optimizer.residual, two.optimizer.residual, strict=True
    ):
        np.testing.assert_allclose(
            total_of(kept), total_of(expected), rtol=2**-23, atol=1e-30
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


def test_error_feedback_where_it_cannot_be(compressor):
    refused = {"required": False, "forbidden": True}
    for asked in (True, False):
        if refused.get(compressor.error_feedback) is asked:
            with pytest.raises(ValueError, match="Error feedback is"):
                tf_dgc.CompressedOptimizer(O.SGD(0.1), compressor, error_feedback=asked)
        else:
            assert validation.uses_error_feedback(compressor, asked) is asked
