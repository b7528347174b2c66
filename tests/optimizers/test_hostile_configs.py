"""Configs are data: loading one never runs what it names."""

import keras
import pytest

import tf_dgc

MARK = "was_here"


def serialized_lambda():
    function = lambda *_: open("was_here", "w").close()  # noqa: E731
    with pytest.warns(UserWarning, match="includes a `lambda`"):
        return keras.saving.serialize_keras_object(function)


def named(module, name, config, kind=None):
    """Return what Keras reads as an object, or a function, of any module."""
    return {
        "module": module,
        "class_name": kind or name,
        "config": name if kind else config,
        "registered_name": name,
    }


def hostile():
    return {
        "a lambda": serialized_lambda(),
        "a function": named("os", "abort", None, "function"),
        "a call": named("os", "system", f"touch {MARK}"),
        "a call with arguments": named("os", "system", {"command": f"touch {MARK}"}),
        "a process": named("subprocess", "Popen", {"args": ["touch", MARK]}),
        "a program": named("builtins", "exec", {"source": f"open({MARK!r}, 'w')"}),
    }


@pytest.mark.parametrize(
    ("optimizer", "key"),
    [
        (lambda sgd: tf_dgc.CompressedOptimizer(sgd, "qsgd"), "inner"),
        (lambda sgd: tf_dgc.CompressedOptimizer(sgd, "qsgd"), "compressor"),
        (tf_dgc.DGCOptimizer, "inner"),
        (tf_dgc.DGCOptimizer, "sparsity"),
        (tf_dgc.DGCOptimizer, "seed"),
    ],
)
@pytest.mark.parametrize("what", list(hostile()))
def test_nothing_is_run(tmp_path, monkeypatch, optimizer, key, what):
    monkeypatch.chdir(tmp_path)
    made = optimizer(keras.optimizers.SGD(0.1))
    config = {**made.get_config(), key: hostile()[what]}
    with pytest.raises((TypeError, ValueError)):
        type(made).from_config(config)
    assert not list(tmp_path.iterdir())


def test_a_learning_rate_is_no_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1)).get_config()
    config["inner"]["config"]["learning_rate"] = serialized_lambda()
    with pytest.raises(ValueError, match="lambda"):
        tf_dgc.DGCOptimizer.from_config(config)
    assert not list(tmp_path.iterdir())


def test_what_is_trusted_would_run(tmp_path, monkeypatch):
    """Else the tests above prove nothing."""
    monkeypatch.chdir(tmp_path)
    load = keras.saving.deserialize_keras_object
    load(serialized_lambda(), safe_mode=False)()
    assert list(tmp_path.iterdir())
