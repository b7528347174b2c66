"""Loading a hostile config never runs code that it names."""

import keras
import pytest

import tf_dgc

MARK = "was_here"


def serialized_lambda():
    function = lambda *_: open("was_here", "w").close()  # noqa: E731
    with pytest.warns(UserWarning, match="includes a `lambda`"):
        return keras.saving.serialize_keras_object(function)


def object_config(module, name, config, kind=None):
    """Return the config of an object or a function of any module."""
    return {
        "module": module,
        "class_name": kind or name,
        "config": name if kind else config,
        "registered_name": name,
    }


def hostile_configs():
    return {
        "a lambda": serialized_lambda(),
        "a function": object_config("os", "abort", None, "function"),
        "a call": object_config("os", "system", f"touch {MARK}"),
        "a call with arguments": object_config(
            "os", "system", {"command": f"touch {MARK}"}
        ),
        "a process": object_config("subprocess", "Popen", {"args": ["touch", MARK]}),
        "a program": object_config(
            "builtins", "exec", {"source": f"open({MARK!r}, 'w')"}
        ),
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
@pytest.mark.parametrize("attack", list(hostile_configs()))
def test_nothing_is_run(tmp_path, monkeypatch, optimizer, key, attack):
    monkeypatch.chdir(tmp_path)
    instance = optimizer(keras.optimizers.SGD(0.1))
    config = {**instance.get_config(), key: hostile_configs()[attack]}
    with pytest.raises((TypeError, ValueError)):
        type(instance).from_config(config)
    assert not list(tmp_path.iterdir())


def test_a_serialized_learning_rate_function_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1)).get_config()
    config["inner"]["config"]["learning_rate"] = serialized_lambda()
    with pytest.raises(ValueError, match="lambda"):
        tf_dgc.DGCOptimizer.from_config(config)
    assert not list(tmp_path.iterdir())


def test_the_lambda_runs_without_safe_mode(tmp_path, monkeypatch):
    """Otherwise the tests above would prove nothing."""
    monkeypatch.chdir(tmp_path)
    load = keras.saving.deserialize_keras_object
    load(serialized_lambda(), safe_mode=False)()
    assert list(tmp_path.iterdir())
