"""Arguments of a wrong kind are refused with a word on them, and NumPy's taken."""

import json
import math

import numpy as np
import pytest

import tf_dgc
from tf_dgc import collectives, compressors
from tf_dgc.arguments import check_number, check_whole

# A class, one of its arguments, and a value that it may have.
NUMBERS = [
    (compressors.AdaComp, "scale", 2),
    (compressors.AdaComp, "per_bin", 2),
    (compressors.CountSketch, "columns", 0.25),
    (compressors.ChunkedTopK, "decay", 0.5),
    (compressors.DIANA, "alpha", 0.25),
    (compressors.ECQ, "alpha", 0.125),
    (compressors.ECQ, "beta", 0.875),
    (compressors.LAQ, "xi", 0.5),
    (compressors.LGC, "learning_rate", 0.25),
    (compressors.ScaleCom, "low_pass", 0.5),
    (compressors.Signum, "momentum", 0.5),
    (compressors.TernGrad, "clip", 2.5),
    (compressors.Threshold, "threshold", 0.5),
    (compressors.Threshold, "capacity", 0.5),
    (compressors.TopK, "sparsity", 0.75),
    (compressors.TwoBit, "threshold", 0.5),
    (compressors.VarianceBased, "alpha", 2),
    (compressors.VarianceBased, "zeta", 0.5),
    (collectives.Gossip, "step_size", 0.5),
    (collectives.OkTopK, "slack", 0.5),
    (collectives.TwoWay, "slack", 0.5),
]
WHOLE = [
    (compressors.AdaComp, "bin_size", 7),
    (compressors.CountSketch, "rows", 3),
    (compressors.LAQ, "bits", 3),
    (compressors.QSGD, "levels", 3),
    (collectives.Star, "shards", 2),
]
WRONG = ["x", math.nan, math.inf, -1, True, [0.5], 1j]


def name_of(part):
    """Return the name of a class, as a part of the test's."""
    return getattr(part, "__name__", None)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize(("make", "what", "right"), [*NUMBERS, *WHOLE], ids=name_of)
def test_wrong_kinds(make, what, right, wrong):
    with pytest.raises(ValueError, match=rf"`{what}` must be a.*Received: {what}="):
        make(**{what: wrong})


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.array])
@pytest.mark.parametrize(("make", "what", "right"), NUMBERS, ids=name_of)
def test_numpy_s_numbers(make, what, right, kind):
    number = kind([right])[0] if kind is np.array else kind(right)
    config = make(**{what: number}).get_config()
    assert json.loads(json.dumps(config))[what] == right


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float32])
@pytest.mark.parametrize(("make", "what", "right"), WHOLE, ids=name_of)
def test_numpy_s_whole_numbers(make, what, right, kind):
    config = make(**{what: kind(right)}).get_config()
    assert json.loads(json.dumps(config))[what] == right


@pytest.mark.parametrize("wrong", [*WRONG, 0, 1.5], ids=str)
def test_steps_between_looks(wrong):
    with pytest.raises(ValueError, match=r"whole number of steps, 1 or more, or None"):
        tf_dgc.DGCOptimizer("sgd", diagnostics=tf_dgc.Diagnostics(check_every=wrong))


@pytest.mark.parametrize(
    ("interval", "within", "beyond", "words"),
    [
        ("[0, 1)", [0, 0.5], [-1e-9, 1, math.nan], r"a number in \[0, 1\)"),
        ("(0, 1]", [1e-9, 1], [0, 1.5], r"a number in \(0, 1\]"),
        ("[1, inf)", [1, 1e300], [0.5, math.inf], "a finite number, 1 or more"),
        ("(0, inf)", [1e-300], [0, math.inf], "a finite number above 0"),
    ],
)
def test_intervals(interval, within, beyond, words):
    for value in within:
        found = check_number("it", value, interval)
        assert found == value
        assert type(found) is float
    for value in beyond:
        with pytest.raises(ValueError, match=rf"`it` must be {words}, so. Received"):
            check_number("it", value, interval, ", so")


def test_whole_numbers_say_what_else_there_is():
    with pytest.raises(
        ValueError, match=r"of steps, 2 or more, or none\. Received: n=1"
    ):
        check_whole("n", 1, 2, " of steps", ", or none")
