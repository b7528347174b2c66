"""Which versions of Python, TensorFlow and Keras are supported."""

import keras
import pytest
import tensorflow as tf

from tf_dgc import _versions


@pytest.mark.parametrize(
    ("package", "version"),
    [("tensorflow", "2.18.1"), ("keras", "2.15.0"), ("python", "3.9.1")],
)
def test_versions_outside_the_supported_range(package, version):
    with pytest.raises(ImportError, match=f"{package} {version} is installed"):
        _versions.check_supported({package: version})


def test_versions_here_are_supported():
    _versions.check_supported(
        {
            "python": _versions.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        }
    )
