"""How the native operations are built, or not."""

import pathlib
import sys

import pytest
import tensorflow as tf

pytest.importorskip("setuptools")
SOURCES = pathlib.Path(__file__).parents[1] / "custom_ops"


@pytest.fixture
def builder(monkeypatch):
    monkeypatch.delenv("TF_DGC_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.syspath_prepend(str(SOURCES))
    import builder

    yield builder
    del sys.modules["builder"]


@pytest.mark.parametrize(
    ("wish", "compiler", "builds"),
    [
        ("", sys.executable, True),
        ("", "no-such-compiler", False),
        ("1", "no-such-compiler", True),  # so that it fails, and says why
        ("0", sys.executable, False),
    ],
)
def test_whether_it_is_built(builder, monkeypatch, wish, compiler, builds):
    monkeypatch.setenv("TF_DGC_NATIVE", wish)
    monkeypatch.setenv("CXX", compiler)
    assert bool(builder.extensions()) == builds


def test_another_value_of_the_variable(builder, monkeypatch):
    monkeypatch.setenv("TF_DGC_NATIVE", "maybe")
    with pytest.raises(ValueError, match="TF_DGC_NATIVE=maybe"):
        builder.extensions()


def test_the_installed_tensorflow_is_built_against(builder, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    directory, version = builder.find_tensorflow()
    assert (directory / "include").is_dir()
    assert version == tf.__version__
    assert builder.build_requirements() == []


def test_tensorflow_is_asked_for_where_there_is_none(builder, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(builder, "find_tensorflow", lambda: None)
    (requirement,) = builder.build_requirements()
    assert requirement.startswith("tensorflow")
    monkeypatch.setenv("TF_DGC_NATIVE", "0")
    assert builder.build_requirements() == []


@pytest.mark.parametrize(
    ("compiler", "what"), [("no-such-compiler", "no C\\+\\+ compiler"), ("false", "-c")]
)
def test_a_failed_build_says_why(builder, monkeypatch, tmp_path, compiler, what):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(builder.CompileError, match=what):
        builder.build(tmp_path / "lib.so", tmp_path / "work")
