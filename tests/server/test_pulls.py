"""Sparse pulls against NumPy: what differs most, exactly, and the rest later."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import initial_weights, make_gradients
from selection import rows
from serving import Served, Trained, leaving, run_together

import tf_dgc
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import QSGD, TopK
from tf_dgc.server import pulls

SHAPES = [(20, 30), (7,), (5, 8)]


def make(dtype, counts=(10, 7, 40)):
    rng = np.random.default_rng(0)
    wide = tf.float64 if dtype == "float64" else tf.float32
    layout = [Tensor(f"t{i}", s, wide, i == 1) for i, s in enumerate(SHAPES)]

    def variables(scale):
        return [keras.Variable(scale * rng.normal(size=s), dtype=dtype) for s in SHAPES]

    return pulls.Form(layout, counts), variables(1.0), variables(0.0)


def numbers(variables):
    return [np.asarray(tf.cast(v.value, tf.float64)) for v in variables]


@pytest.mark.parametrize("dtype", rows(["float32", "float64", "bfloat16"], ["float32"]))
def test_the_largest_differences_are_pulled_exactly_and_the_rest_is_kept(dtype):
    form, of_server, of_worker = make(dtype)
    copies = pulls.Copies(of_server, form)
    copies.reset(3)
    pulls.assign(of_worker, pulls.collect(of_server))
    for mine, theirs in zip(numbers(of_worker), numbers(of_server), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for step in range(3):
        rng = np.random.default_rng(step)
        for v in of_server:
            v.assign(v.value + tf.cast(rng.normal(size=v.shape), dtype))
        before, wanted = numbers(of_worker), numbers(of_server)
        words = copies.pull(3)
        assert words.shape == [form.num_words]
        pulls.take(form, of_worker, words)
        for k, old, new, found in zip(
            form.counts, before, wanted, numbers(of_worker), strict=True
        ):
            gap = np.abs(new - old).ravel()
            moved = (found != old).ravel()
            np.testing.assert_array_equal(found.ravel()[moved], new.ravel()[moved])
            assert moved.sum() <= k
            if k < gap.size:
                assert gap[~moved].max() <= np.sort(gap)[-k] + 1e-12
            else:
                np.testing.assert_array_equal(found, new)
    for _ in range(600 // 10):  # nothing moves any more, and all arrives
        pulls.take(form, of_worker, copies.pull(3))
    for mine, theirs in zip(numbers(of_worker), numbers(of_server), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_how_much_is_pulled():
    tensors = [Tensor("a", (100, 100), tf.float32, False)]
    tensors += [Tensor("b", (7,), tf.float32, True)]
    assert pulls.form_of(tensors, TopK(0.99), 3, None).counts == [300, 7]
    assert pulls.form_of(tensors, TopK(0.5), 3, None).counts == [10_000, 7]
    assert pulls.form_of(tensors, QSGD(), 3, 0.9).counts == [1000, 7]


def test_who_is_gone_is_forgotten():
    form, of_server, _ = make("float32")
    copies = pulls.Copies(of_server, form)
    copies.reset(0)
    copies.forget(0)
    copies.forget(1)
    with pytest.raises(KeyError):
        copies.pull(0)


@pytest.mark.slow
def test_with_plain_sgd_sparse_pulls_are_whole_ones(monkeypatch):
    """All that N pushes of 5 % change goes in a pull of N times as many entries."""
    gradients, weights = make_gradients(2, 4, "float32"), initial_weights("float32")
    found = []
    for pull in ("whole", "sparse"):
        with Served(2) as served:
            sgd = keras.optimizers.SGD(0.1, momentum=0.9)
            method = tf_dgc.compressors.TopK(0.95)
            settings = {"compressor": method, "pull": pull, "min_compress_size": 100}
            workers = [
                Trained(served.optimizer(monkeypatch, i, sgd, **settings), weights)
                for i in range(2)
            ]

            def run(i, workers=workers):
                for step in gradients:
                    workers[i].step(step[i])

            with leaving(*workers):
                run_together(lambda: run(0), lambda: run(1))
            found += [w.weights() for w in workers] + [served.weights()]
            sizes = workers[0].optimizer.bytes_per_pull
    whole = found[0]
    for other in found[1:]:
        for mine, theirs in zip(other, whole, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert sizes < sum(w.nbytes for w in weights) / 3
