"""Wrong arguments of the engine's kernels raise errors before they are queued."""

import pytest
from common import cuda_engine, cuda_library

NONE = cuda_engine.vectors([])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "power_sgd"}, "no kernels of this method"),
        ({"parameters": [1, 2]}, "other parameters"),
        ({"size": -1}, "size is impossible"),
        ({"size": 2**31}, "size is impossible"),
        ({"columns": 2}, "columns are impossible"),
        ({"vector": 0}, "does not travel in this way"),
        ({"method": "float16"}, "does not travel in this way"),
        ({"method": "one_bit", "size": 0}, "parameters are impossible"),
        (
            {"method": "qsgd, fixed", "parameters": [3, 0, 0, 0, 0]},
            "parameters are impossible",
        ),
    ],
)
def test_small_wrong_arguments(engine, wrong, message):
    right = {"method": "two_bit", "parameters": [0.5], "size": 5}
    tensors = cuda_engine.tensors([{**right, **wrong}])
    assert engine.words(tensors) == -1
    assert engine.encode_workspace(tensors) == -1
    assert engine.sum_workspace(tensors, 1) == -1
    with pytest.raises(ValueError, match=message):
        engine.encode(
            None, tensors, cuda_engine.Coding(), *[None] * 2, NONE, *[None] * 3
        )


@pytest.mark.parametrize(
    ("wrong", "rule", "message"),
    [
        ({"gradient_type": 1}, "none", "must be float32, bfloat16 or float16"),
        ({}, "momentum", "momentum needs residuals"),
    ],
)
def test_small_wrong_steps(engine, wrong, rule, message):
    right = {"method": "ef_sign_sgd", "size": 5}
    tensors = cuda_engine.tensors([{**right, **wrong}])
    coding = cuda_engine.Coding(cuda_library.RULES[rule])
    with pytest.raises(ValueError, match=message):
        engine.encode(None, tensors, coding, *[None] * 2, NONE, *[None] * 3)


@pytest.mark.parametrize(
    ("kinds", "message"), [([], "no such vector"), ([0], "of another type")]
)
def test_small_wrong_vectors(engine, kinds, message):
    description = {"method": "float16", "parameters": [1], "size": 5, "vector": 0}
    tensors = cuda_engine.tensors([description])
    vectors = cuda_engine.vectors([(None, kind) for kind in kinds])
    with pytest.raises(ValueError, match=message):
        engine.encode(
            None, tensors, cuda_engine.Coding(), None, None, vectors, *[None] * 3
        )


@pytest.mark.parametrize(
    ("num_workers", "extra", "message"),
    [(0, 0, "workers"), (70_000, 0, "workers"), (1, 1, "another length")],
)
def test_small_wrong_buffers(engine, num_workers, extra, message):
    tensors = cuda_engine.tensors([{"method": "ef_sign_sgd", "size": 5}])
    words = engine.words(tensors) + extra
    with pytest.raises(ValueError, match=message):
        engine.sum(
            None, tensors, 0, None, num_workers, words, NONE, [None], *[None] * 4
        )
