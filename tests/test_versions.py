"""Which versions of Python, TensorFlow and Keras are supported."""

import ast
import importlib
import pathlib
import re
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


@pytest.mark.slow
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
    assert "tensorflow 2.99.0 is installed. It is untested" in newer
    assert "without its native operations" in native


def test_versions_here_are_supported():
    _versions.check_supported(
        {
            "python": _versions.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        }
    )


@pytest.mark.parametrize("name", ["torch", "jax", "numpy", "tensorflw"])
def test_other_backends_are_refused_at_import(name):
    """By the variable, also where Keras could not load that backend."""
    ended = programs.run([sys.executable, "-c", "import tf_dgc"], KERAS_BACKEND=name)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: tf_dgc works with Keras's TensorFlow backend")
    assert "KERAS_BACKEND=tensorflow" in last
    assert last.endswith(f"Received: the backend '{name}'")


@pytest.mark.slow
def test_the_backend_that_keras_loaded_counts():
    """Not the variable, which may have changed since."""
    program = """
import os, keras
os.environ["KERAS_BACKEND"] = "torch"
loaded, keras.config.backend = keras.config.backend, lambda: "jax"
try:
    import tf_dgc
except ImportError as error:
    print(error)
keras.config.backend = loaded
import tf_dgc
print(tf_dgc.DGCOptimizer.__name__)
"""
    ended = programs.run([sys.executable, "-c", program])
    error, name = ended.stdout.strip().splitlines()
    assert error.endswith("Received: the backend 'jax'")
    assert name == "DGCOptimizer"


def test_the_command_line_refuses_other_backends():
    ended = programs.run(
        [sys.executable, "-m", "tf_dgc", "doctor"], KERAS_BACKEND="jax"
    )
    assert ended.returncode == 1
    assert "tf-dgc: tf_dgc works with Keras's TensorFlow backend" in ended.stderr
    assert "Traceback" not in ended.stderr


ROOT = pathlib.Path(__file__).parents[1]


def private_names():
    """Return the names of the table in docs/research/versions.md."""
    text = (ROOT / "docs/research/versions.md").read_text()
    table = text.partition("## Private names")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line[:3] == "| `"]
    return [name for cell in cells for name in re.findall("`([^`]+)`", cell)]


def look_up(name):
    """Evaluate a dotted name, whose first parts may be modules, or an expression."""
    if "(" in name or name.startswith("tf."):
        return eval(name, {"keras": keras, "tf": tf})
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise ImportError(name)


@pytest.mark.parametrize("name", private_names())
def test_private_name_exists(name):
    look_up(name)


def test_private_imports_are_in_the_table():
    names = private_names()
    for path in (ROOT / "tf_dgc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith(
                ("keras.src", "tensorflow.python")
            ):
                for alias in node.names:
                    imported = f"{module}.{alias.name}"
                    assert any(name.startswith(imported) for name in names), path
