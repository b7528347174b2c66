"""Building of the native operations."""

import pathlib
import sys

import pytest
import tensorflow as tf

pytest.importorskip("setuptools")
SOURCES = pathlib.Path(__file__).parents[2] / "custom_ops"


@pytest.fixture
def builder(monkeypatch):
    monkeypatch.delenv("TF_DGC_NATIVE", raising=False)
    for name in ("CXX", "CXXFLAGS", "TF_DGC_TENSORFLOW"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(SOURCES))
    import builder

    yield builder
    del sys.modules["builder"]


@pytest.mark.parametrize(
    ("setting", "compiler", "is_built"),
    [
        ("", sys.executable, True),
        ("", "no-such-compiler", False),
        ("1", "no-such-compiler", True),  # fails with an error
        ("0", sys.executable, False),
    ],
)
def test_extensions_depend_on_setting_and_compiler(
    builder, monkeypatch, setting, compiler, is_built
):
    monkeypatch.setenv("TF_DGC_NATIVE", setting)
    monkeypatch.setenv("CXX", compiler)
    assert bool(builder.extensions()) == is_built


@pytest.mark.parametrize("empty", ["", " "])
def test_empty_variable_means_the_default_compiler(builder, monkeypatch, empty):
    monkeypatch.setattr(builder.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("CXX", empty)
    assert builder.compiler() == ["g++"]


def test_invalid_setting_raises(builder, monkeypatch):
    monkeypatch.setenv("TF_DGC_NATIVE", "maybe")
    with pytest.raises(ValueError, match="TF_DGC_NATIVE=maybe"):
        builder.extensions()


def test_builds_against_the_installed_tensorflow(builder, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    ((directory, version),) = builder.find_tensorflows()
    assert (directory / "include").is_dir()
    assert version == tf.__version__
    assert builder.build_requirements() == []


@pytest.fixture
def commands(builder, monkeypatch):
    """Return the compile commands, which only create files."""
    commands = []

    def compile_and_link(command, libraries, toolkit, work):
        commands.append(command)
        for library in libraries:
            library.parent.mkdir(parents=True, exist_ok=True)
            library.write_bytes(b"library")

    monkeypatch.setenv("TF_DGC_CUDA", "0")
    monkeypatch.setattr(builder, "_compile_and_link", compile_and_link)
    return commands


def test_existing_library_is_not_rebuilt(builder, commands, tmp_path):
    for _ in range(2):
        assert builder.build(tmp_path, tmp_path) == [builder.minor(tf.__version__)]
    assert len(commands) == 1


@pytest.mark.parametrize("change", ["library", "stamp", "compiler", "sources"])
def test_rebuilt_after_a_change(builder, commands, tmp_path, monkeypatch, change):
    builder.build(tmp_path, tmp_path)
    library = tmp_path / builder.minor(tf.__version__) / builder.LIBRARY
    if change == "library":
        library.write_bytes(b"damaged")
    elif change == "stamp":
        library.with_name(builder.STAMP).write_text("{")
    elif change == "compiler":
        monkeypatch.setenv("CXX", "g++ -g")
    else:
        monkeypatch.setattr(builder, "source_hash", lambda: "another")
    builder.build(tmp_path, tmp_path)
    assert len(commands) == 2


def test_library_for_every_tensorflow(builder, commands, tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, version in zip(folders, ("2.19.1", "2.20.0"), strict=True):
        (folder / "tensorflow" / "include").mkdir(parents=True)
        (folder / f"tensorflow-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: tensorflow\nVersion: {version}\n"
        (folder / f"tensorflow-{version}.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.setenv("TF_DGC_TENSORFLOW", f"{folders[0]}:{folders[1]}")
    assert builder.build(tmp_path / "native", tmp_path) == ["2.19", "2.20"]
    for name, version in (("2.19", "2.19.1"), ("2.20", "2.20.0")):
        stamp = (tmp_path / "native" / name / builder.STAMP).read_text()
        assert f'"tensorflow": "{version}"' in stamp
    assert builder.build_requirements() == []
    monkeypatch.setenv("TF_DGC_TENSORFLOW", f"{folders[0]}:{tmp_path}")
    with pytest.raises(builder.CompileError, match=f"none in {tmp_path}"):
        builder.build(tmp_path / "native", tmp_path)


def test_more_flags_come_last(builder, commands, tmp_path, monkeypatch):
    monkeypatch.setenv("CXXFLAGS", "-O1 -g")
    builder.build(tmp_path, tmp_path)
    stamp = tmp_path / builder.minor(tf.__version__) / builder.STAMP
    assert f'{builder.FLAGS[-1]} -O1 -g"' in stamp.read_text()


def test_missing_tensorflow_is_a_build_requirement(builder, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(builder, "find_tensorflows", list)
    (requirement,) = builder.build_requirements()
    assert requirement.startswith("tensorflow")
    monkeypatch.setenv("TF_DGC_NATIVE", "0")
    assert builder.build_requirements() == []


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("no-such-compiler", "no C\\+\\+ compiler"), ("false", "-c")],
)
def test_failed_build_raises(builder, monkeypatch, tmp_path, compiler, message):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(builder.CompileError, match=message):
        builder.build(tmp_path / "native", tmp_path / "work")


@pytest.fixture
def toolkit(builder, monkeypatch):
    for name in ("TF_DGC_CUDA", "TF_DGC_CUDA_ARCHITECTURES"):
        monkeypatch.delenv(name, raising=False)
    import cuda_toolkit

    yield cuda_toolkit
    del sys.modules["cuda_toolkit"]


@pytest.fixture
def nvcc(toolkit, monkeypatch, tmp_path):
    """Return the path of a fake nvcc, which only prints its version."""
    path = tmp_path / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.1'\n")
    path.chmod(0o755)
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return path


def test_cuda_kernels_are_compiled_by_nvcc(toolkit, nvcc, monkeypatch):
    cuda = toolkit.find()
    assert cuda.describe() == "12.9 (sm_80, sm_90, PTX 90)"
    source = SOURCES / "cuda" / "kernels.cu"
    command = [str(c) for c in cuda.compile_command(["g++"], source, "x.o")]
    assert command[0] == str(nvcc)
    assert "-gencode=arch=compute_80,code=sm_80" in command
    assert "-gencode=arch=compute_90,code=compute_90" in command
    assert cuda.libraries()[:2] == [f"-L{nvcc.parents[1]}/lib64", "-lcudart_static"]


@pytest.mark.parametrize(
    ("host", "program", "options"),
    [
        (["g++"], "g++", []),
        (["ccache", "g++"], "g++", []),
        (["env", "CCACHE_DIR=/tmp", "ccache", "clang++", "-m64"], "clang++", ["-m64"]),
    ],
)
def test_nvcc_gets_the_host_compiler_without_wrappers(
    toolkit, nvcc, host, program, options
):
    command = toolkit.find().compile_command(host, SOURCES / "cuda" / "x.cu", "x.o")
    assert command[command.index("-ccbin") + 1] == program
    passed_on = [
        c.split("=", 1)[1] for c in command if str(c).startswith("-Xcompiler=")
    ]
    assert passed_on == [*options, "-fPIC", "-fvisibility=hidden"]


def test_cuda_architectures_can_be_chosen(toolkit, nvcc, monkeypatch):
    monkeypatch.setenv("TF_DGC_CUDA_ARCHITECTURES", "86;120a")
    assert toolkit.find().architectures == ["86", "120a"]
    monkeypatch.setenv("TF_DGC_CUDA_ARCHITECTURES", "sm_90")
    with pytest.raises(ValueError, match="TF_DGC_CUDA_ARCHITECTURES=sm_90"):
        toolkit.find()


def test_cuda_can_be_disabled_and_required(toolkit, nvcc, monkeypatch):
    monkeypatch.setenv("TF_DGC_CUDA", "0")
    assert toolkit.find() is None
    monkeypatch.setenv("TF_DGC_CUDA", "perhaps")
    with pytest.raises(ValueError, match="TF_DGC_CUDA=perhaps"):
        toolkit.find()
    monkeypatch.setenv("TF_DGC_CUDA", "1")
    monkeypatch.setattr(toolkit.shutil, "which", lambda _: None)
    with pytest.raises(FileNotFoundError, match="no nvcc"):
        toolkit.find()
    monkeypatch.setenv("TF_DGC_CUDA", "")
    assert toolkit.find() is None


@pytest.mark.parametrize("required", [False, True])
def test_failed_cuda_build(builder, toolkit, nvcc, monkeypatch, required):
    attempts = []

    def compile_and_link(command, libraries, toolkit, work):
        attempts.append(toolkit is not None)
        if toolkit:
            raise builder.CompileError("nvcc says no")
        for library in libraries:
            library.parent.mkdir(parents=True)
            library.write_bytes(b"library")

    monkeypatch.setattr(builder, "_compile_and_link", compile_and_link)
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(builder, "_stamp", lambda *_: {"cuda": ""})
    native = nvcc.parent / "native"
    if required:
        monkeypatch.setenv("TF_DGC_CUDA", "1")
        with pytest.raises(builder.CompileError, match="nvcc says no"):
            builder.build(native, nvcc.parent)
    else:
        builder.build(native, nvcc.parent)
        assert attempts == [True, False]
        assert list(native.glob(f"*/{builder.LIBRARY}"))
