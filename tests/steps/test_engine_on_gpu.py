"""Conditions for the engine's CUDA kernels; tests/gpu checks their results."""

from types import SimpleNamespace

import pytest

from tf_dgc import native_library
from tf_dgc.compressors.base import NativeMethod
from tf_dgc.steps import engine_step, gpu_check, native


@pytest.fixture
def uses_kernels(monkeypatch):
    """Return a function that returns whether kernels are used."""

    def check(methods, problem="", on_gpu=(True, True, True)):
        state = SimpleNamespace(cuda_methods=["whole", "two_bit"])
        monkeypatch.setattr(gpu_check, "uses_kernels", lambda: not problem)
        monkeypatch.setattr(native_library, "load_library", lambda: state)
        monkeypatch.setattr(native, "is_on_gpu", lambda variables: variables[0])
        worker_state = SimpleNamespace(
            velocity=on_gpu[:1], residual=on_gpu[1:2], second_moment=on_gpu[2:]
        )
        inputs = SimpleNamespace(worker_state=worker_state)
        return engine_step.gpu_supports(
            inputs, [NativeMethod(name) for name in methods]
        )

    return check


def test_kernels_are_used_if_all_methods_have_one(uses_kernels):
    assert uses_kernels(["whole", "two_bit"])
    assert uses_kernels(["two_bit"], on_gpu=())
    assert not uses_kernels(["whole", "top_k"])


def test_kernels_are_not_used_if_they_cannot_run(uses_kernels):
    assert not uses_kernels(["two_bit"], problem="they were not built")
    assert not uses_kernels(["two_bit"], on_gpu=(True, False))
    assert not uses_kernels(["two_bit"], on_gpu=(True, True, False))
