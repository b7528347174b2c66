"""When the engine's CUDA kernels are taken; what they compute is in tests/gpu."""

from types import SimpleNamespace

import pytest

from tf_dgc import native_library
from tf_dgc.compressors.base import NativeMethod
from tf_dgc.steps import engine_step, native


@pytest.fixture
def take(monkeypatch):
    """Return a function that says whether kernels are taken."""

    def answer(methods, problem="", on_gpu=(True, True, True)):
        state = SimpleNamespace(cuda_problem=problem, cuda_methods=["whole", "two_bit"])
        monkeypatch.setattr(native_library, "load_library", lambda: state)
        monkeypatch.setattr(native, "is_on_gpu", lambda variables: variables[0])
        worker_state = SimpleNamespace(
            velocity=on_gpu[:1], residual=on_gpu[1:2], second_moment=on_gpu[2:]
        )
        inputs = SimpleNamespace(worker_state=worker_state)
        return engine_step.gpu_supports(
            inputs, [NativeMethod(name) for name in methods]
        )

    return answer


def test_kernels_are_taken_where_all_has_some(take):
    assert take(["whole", "two_bit"])
    assert take(["two_bit"], on_gpu=())
    assert not take(["whole", "top_k"])


def test_kernels_are_not_taken_where_they_cannot_run(take):
    assert not take(["two_bit"], problem="they were not built")
    assert not take(["two_bit"], on_gpu=(True, False))
    assert not take(["two_bit"], on_gpu=(True, True, False))
