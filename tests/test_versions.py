"""Which versions of Python, TensorFlow and Keras are supported."""

import sys

import keras
import programs
import pytest
import tensorflow as tf

from tf_dgc import _versions


@pytest.mark.parametrize(
    ("package", "version"),
    [("tensorflow", "2.18.1"), ("keras", "2.15.0"), ("python", "3.9.1")],
)
def test_older_versions_are_refused(package, version):
    with pytest.raises(ImportError, match=f"{package} {version} is installed"):
        _versions.check_supported({package: version})


@pytest.mark.parametrize(
    ("package", "version"),
    [("tensorflow", "2.22.0rc1"), ("keras", "3.16.0"), ("python", "3.14.0")],
)
def test_newer_versions_go_with_a_warning(package, version):
    """One, which says what may come."""
    with pytest.warns(RuntimeWarning, match=f"{package} {version} is.*private") as said:
        _versions.check_supported({package: version})
    assert len(said) == 1


def test_a_newer_tensorflow_trains():
    """Without native operations, and by one warning of each kind."""
    program = """
import warnings
import keras
import tensorflow as tf
tf.__version__ = "2.99.0"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always", RuntimeWarning)
    import tf_dgc
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.compile(tf_dgc.DGCOptimizer("sgd"), "mse")
    for _ in range(2):
        model.fit(tf.ones((4, 64)), tf.ones((4, 64)), verbose=0)
for warning in said:
    if "tf_dgc" in str(warning.message):
        print(warning.message)
"""
    ended = programs.run([sys.executable, "-c", program], TF_DGC_NATIVE="")
    assert ended.returncode == 0
    newer, native = ended.stdout.strip().splitlines()
    assert "tensorflow 2.99.0 is installed. It was not tried" in newer
    assert "without its native operations" in native


def test_versions_here_are_supported():
    _versions.check_supported(
        {
            "python": _versions.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        }
    )
