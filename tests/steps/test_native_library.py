"""Loading of the native operations, and messages about missing or unusable ones."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import warnings
from unittest.mock import ANY

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

import tf_dgc
from tf_dgc import native_library
from tf_dgc.cli import doctor
from tf_dgc.steps import gpu_check

SOURCES = pathlib.Path(__file__).parents[2] / "custom_ops"
IS_BUILT = native_library.load_library().library is not None


@pytest.fixture
def cleared_cache():
    """Clear the cache of `load_library` before and after the test."""
    native_library.load_library.cache_clear()
    native_library.warn_if_missing.cache_clear()
    yield
    native_library.load_library.cache_clear()
    native_library.warn_if_missing.cache_clear()


def write(directory, content=b"library", **changes):
    """Write a library and its stamp; return their paths."""
    directory = directory / "2.21"
    directory.mkdir(exist_ok=True)
    library, stamp = directory / "library.so", directory / "stamp.json"
    library.write_bytes(content)
    fields = {
        "tensorflow": tf.__version__,
        "compiler": "g++",
        "sources": native_library._hash_sources(SOURCES),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    stamp.write_text(json.dumps({**fields, **changes}))
    return library, stamp


def test_valid_stamp(tmp_path):
    stamp, problem = native_library.check_stamp(*write(tmp_path))
    assert problem == ""
    assert stamp["tensorflow"] == tf.__version__


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensorflow": "2.18.1"}, "built for TensorFlow 2.18"),
        ({"tensorflow": "3.21.0"}, "built for TensorFlow 3.21"),
        ({"sha256": "0"}, "not the file that its stamp describes"),
        ({"sources": "0"}, "changed since it was built"),
    ],
)
def test_stamp_of_another_build(monkeypatch, tmp_path, changes, message):
    monkeypatch.setattr(
        native_library, "_source_directory", lambda: SOURCES
    )  # as in a source tree
    assert message in native_library.check_stamp(*write(tmp_path, **changes))[1]


def test_source_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(
        native_library, "_DIRECTORY", SOURCES.parent / "tf_dgc" / "_native"
    )
    assert native_library._source_directory() == SOURCES
    # A foreign folder next to an installed package, then a foreign project.
    monkeypatch.setattr(native_library, "_DIRECTORY", tmp_path / "tf_dgc" / "_native")
    operations = tmp_path / "custom_ops"
    (operations / "cpu").mkdir(parents=True)
    (operations / "cpu" / "theirs.cc").write_text("int main() {}")
    assert native_library._source_directory() is None
    assert native_library.check_stamp(*write(tmp_path)) == (ANY, "")
    (operations / "builder.py").touch()
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "theirs"\n')
    assert native_library._source_directory() is None
    project.write_text('[project]\nname = "tf_dgc"\n')
    assert native_library._source_directory() == operations
    assert "changed since" in native_library.check_stamp(*write(tmp_path))[1]


def test_library_without_a_matching_stamp(tmp_path):
    library, stamp = write(tmp_path)
    library.write_bytes(b"another file")
    assert "not the file" in native_library.check_stamp(library, stamp)[1]
    stamp.write_text("{}")
    assert "tf_dgc did not build it" in native_library.check_stamp(library, stamp)[1]
    stamp.unlink()
    assert "tf_dgc did not build it" in native_library.check_stamp(library, stamp)[1]
    library.unlink()
    assert "were not built" in native_library.check_stamp(library, stamp)[1]


def test_libraries_for_other_versions(tmp_path):
    for version in ("2.7", "2.8"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "library.so").touch()
    _, problem = native_library.check_stamp(
        tmp_path / "2.9" / "library.so", tmp_path / "stamp.json"
    )
    assert f"built for TensorFlow 2.7 and 2.8, and this is {tf.__version__}" in problem


def use(monkeypatch, library, stamp, setting=None):
    monkeypatch.setattr(native_library, "_LIBRARY", library)
    monkeypatch.setattr(native_library, "_STAMP", stamp)
    if setting is None:
        monkeypatch.delenv("TF_DGC_NATIVE", raising=False)
    else:
        monkeypatch.setenv("TF_DGC_NATIVE", setting)


def test_library_that_cannot_be_loaded(cleared_cache, monkeypatch, tmp_path, capsys):
    use(monkeypatch, *write(tmp_path, b"no ELF file"))
    assert "could not load" in native_library.load_library().reason
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "native operations   no" in printed
    assert "pip install" in printed


def test_missing_library_warns_once(cleared_cache, monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "none.so", tmp_path / "none.json")
    with pytest.warns(RuntimeWarning, match="several times as long.*pip install"):
        tf_dgc.DGCOptimizer(keras.optimizers.SGD())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tf_dgc.DGCOptimizer(keras.optimizers.SGD())


def test_native_operations_disabled(cleared_cache, monkeypatch, capsys):
    monkeypatch.setenv("TF_DGC_NATIVE", "0")
    tf_dgc.DGCOptimizer(keras.optimizers.SGD())  # no warning
    assert doctor.main() == 0
    assert "TF_DGC_NATIVE=0 disables" in capsys.readouterr().out


def test_missing_required_library_raises(cleared_cache, monkeypatch, tmp_path, capsys):
    use(monkeypatch, tmp_path / "none.so", tmp_path / "none.json", "1")
    with pytest.raises(ImportError, match="were not built"):
        tf_dgc.DGCOptimizer(keras.optimizers.SGD())
    assert doctor.main() == 1
    assert "were not built" in capsys.readouterr().err


def test_invalid_setting_raises(cleared_cache, monkeypatch):
    monkeypatch.setenv("TF_DGC_NATIVE", "yes")
    with pytest.raises(ValueError, match="TF_DGC_NATIVE=yes"):
        native_library.load_library()


@pytest.mark.parametrize(
    "setting", ["", " ", 'g++ "', "/etc/passwd", "no-such-compiler"]
)
def test_doctor_survives_any_compiler(monkeypatch, setting):
    monkeypatch.setenv("CXX", setting)
    compiler = dict(doctor.report(native_library.load_library()))["compiler here"]
    if setting.strip():
        assert compiler.startswith("none (")
    else:
        monkeypatch.delenv("CXX")
        assert (
            compiler
            == dict(doctor.report(native_library.load_library()))["compiler here"]
        )


@pytest.mark.slow
@pytest.mark.skipif(not IS_BUILT, reason=native_library.load_library().reason)
def test_doctor_finds_the_native_operations(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "tf_dgc", "doctor"],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_DGC_VECTOR_LEVEL": "baseline"},
        cwd=tmp_path,  # so that the installed package is imported
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for line in ("native operations   yes", "vector level      baseline", "path"):
        assert line in result.stdout


@pytest.mark.skipif(not IS_BUILT, reason="the native operations are not built")
@pytest.mark.parametrize("name", ["TfDgcCompress", "TfDgcSum", "TfDgcDescend"])
def test_kernels_of_both_devices_are_registered(name):
    registered = kernels.get_registered_kernels_for_op(name).kernel
    devices = {
        kernel.device_type: list(kernel.host_memory_arg) for kernel in registered
    }
    expected = {"CPU", "GPU"} if native_library.load_library().cuda else {"CPU"}
    assert set(devices) == expected
    if "GPU" in expected:
        assert "counts" in devices["GPU"]


@pytest.mark.parametrize(
    ("stamp", "environment", "problem"),
    [
        ({}, {}, "they were not built"),
        ({"cuda": "13.0 (sm_90)"}, {"TF_DGC_CUDA": "0"}, "TF_DGC_CUDA=0 disables them"),
    ],
)
def test_reason_why_cuda_kernels_are_not_used(monkeypatch, stamp, environment, problem):
    monkeypatch.delenv("TF_DGC_CUDA", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    state = native_library.NativeLibrary(object(), "", True, stamp)
    assert state.cuda_problem == problem
    assert bool(state.cuda) or not state.cuda_methods
    rows = dict(doctor.report(state._replace(library=None)))
    assert rows["path"] == "TensorFlow operations"


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="needs no GPU")
def test_a_machine_without_a_gpu_is_named_as_the_reason():
    """CUDA would say that its driver is insufficient."""
    gpu_check._find_problem.cache_clear()
    assert gpu_check.find_problem() == "TensorFlow has no GPU"


@pytest.mark.skipif(
    not native_library.load_library().cuda
    or bool(tf.config.list_physical_devices("GPU")),
    reason="needs CUDA kernels, and no GPU to run them",
)
def test_cuda_kernels_without_a_gpu(monkeypatch):
    monkeypatch.setenv("TF_DGC_CUDA", "1")
    assert native_library.load_library().cuda_problem  # CUDA's message
