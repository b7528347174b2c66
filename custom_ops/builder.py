"""Compile the native operations while the package is built.

The library belongs to one minor version of TensorFlow. A stamp beside it says to which,
with a checksum of the library; `tf_dgc/ops/loader.py` reads it before loading.

The environment variable TF_DGC_NATIVE decides: unset, the library is built if there is
a compiler, and the package works without it; 1, building it must succeed; 0, it is
not built. What is said of CUDA in `cuda_toolkit.py` comes on top.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata

import cuda_toolkit
from packaging.requirements import Requirement
from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCE = pathlib.Path(__file__).resolve().parent
LIBRARY = "libtf_dgc_ops.so"
STAMP = "stamp.json"
_COMPILED = ("cpu", "cuda", "cuda_engine", "engine", "methods", "tensorflow")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",  # the same results whether or not there are fused operations
    "-fno-math-errno",  # or a loop with a square root is not vectorized
    "-fno-trapping-math",  # nobody reads which exceptions arithmetic would raise
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]


def extensions():
    """Return the extension modules for `setup`: none if building is forbidden."""
    if _wish() == "0" or (_wish() != "1" and compiler() is None):
        return []
    return [Extension("tf_dgc._native.ops", [])]


def build_requirements():
    """Return TensorFlow's requirement if it must be brought in to build against.

    A TensorFlow that is installed already is the one that the library is for.
    """
    if not extensions() or find_tensorflow() is not None:
        return []
    return [str(_tensorflow_requirement())]


def compiler():
    """Return the C++ compiler as a list of arguments, or None.

    It is what CXX says, and g++ if CXX is not set or empty.
    """
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    return command if shutil.which(command[0]) else None


def find_tensorflow():
    """Return directory and version of the TensorFlow to build against, or None.

    It is looked for where this build runs (an isolated environment, perhaps) and where
    the package is going to be installed. It is not imported.
    """
    supported = _tensorflow_requirement().specifier
    for path in [
        *sys.path,
        *(sysconfig.get_paths()[p] for p in ("purelib", "platlib")),
    ]:
        for found in metadata.distributions(name="tensorflow", path=[path]):
            directory = pathlib.Path(path) / "tensorflow"
            if found.version in supported and (directory / "include").is_dir():
                return directory, found.version
    return None


def tensorflow_flags(directory):
    """Return the compiler flags for the headers of the TensorFlow in `directory`."""
    return [
        *("-isystem", str(directory / "include")),
        "-D_GLIBCXX_USE_CXX11_ABI=1",
        "-DEIGEN_MAX_ALIGN_BYTES=64",
        "-Wno-deprecated-declarations",  # its own mutex
    ]


def sources(cuda, work):
    """Return the files to compile, those that take longest first.

    TensorFlow's headers take longer than what is behind them, so that all files which
    include them are one, in the directory `work`.
    """
    patterns = ["cuda*/*.cu", "tensorflow/gpu_*.cc"] if cuda else []
    gpu = _files(patterns)
    with_tensorflow = work / "with_tensorflow.cc"
    with_tensorflow.write_text(
        "".join(f'#include "{path}"\n' for path in _files(["tensorflow/[!g]*.cc"]))
    )
    return [*gpu, with_tensorflow, *_files(["methods/*.cc", "cpu/*.cc", "engine/*.cc"])]


def _files(patterns):
    return [path for pattern in patterns for path in sorted(SOURCE.glob(pattern))]


def source_hash():
    """Return a hash of everything that is compiled."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.glob("*/*")):
        if path.parent.name in _COMPILED and path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class BuildNative(build_ext):
    """Builds the library of operations, which is no Python module."""

    def get_ext_filename(self, fullname):
        """Return where the library goes in the package."""
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext):
        """Compile and link; without TF_DGC_NATIVE=1 a failure is only reported."""
        library = pathlib.Path(self.get_ext_fullpath(ext.name))
        try:
            build(library, pathlib.Path(self.build_temp))
        except CompileError as error:
            if _wish() == "1":
                raise
            ext.optional = True  # so that nobody asks for the file
            self.announce(
                f"tf_dgc is installed without its native operations: {error}", level=3
            )

    def copy_extensions_to_source(self):
        """Put the library and its stamp into the source tree (editable install)."""
        package = SOURCE.parent / "tf_dgc" / "_native"
        for ext in self.extensions:
            built = pathlib.Path(self.build_lib) / self.get_ext_filename(ext.name)
            for path in (built, built.with_name(STAMP)):
                if path.exists():
                    package.mkdir(exist_ok=True)
                    new = package / f"{path.name}.new"
                    shutil.copy(path, new)
                    # Programs that run keep the file they have loaded.
                    os.replace(new, package / path.name)


def build(library, work):
    """Build `library` and its stamp, with object files in the directory `work`.

    Nothing is done if it is there already, built of the same in the same way.
    """
    command = compiler()
    if command is None:
        raise CompileError("there is no C++ compiler (g++, or what CXX names)")
    found = find_tensorflow()
    if found is None:
        raise CompileError(f"there is no {_tensorflow_requirement()} to build against")
    work.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    try:
        toolkit = cuda_toolkit.find()
    except (FileNotFoundError, ValueError) as error:
        raise CompileError(str(error)) from error
    stamp = _stamp(found[1], command, toolkit)
    if _is_built(library, stamp):
        return
    try:
        _compile_and_link(command, found, toolkit, library, work)
    except CompileError as error:
        if toolkit is None or cuda_toolkit.wish() == "1":
            raise
        print(f"tf_dgc is built without its CUDA kernels: {error}", file=sys.stderr)
        stamp = _stamp(found[1], command, None)
        _compile_and_link(command, found, None, library, work)
    text = json.dumps(_sealed(stamp, library), indent=2)
    library.with_name(STAMP).write_text(text, encoding="utf-8")


def _is_built(library, stamp):
    """Whether there is a library of this stamp, as it was when that was written."""
    try:
        known = json.loads(library.with_name(STAMP).read_text(encoding="utf-8"))
        return known == _sealed(stamp, library)
    except (OSError, ValueError):
        return False


def _sealed(stamp, library):
    return {**stamp, "sha256": hashlib.sha256(library.read_bytes()).hexdigest()}


def _compile_and_link(command, found, toolkit, library, work):
    directory, _ = found
    flags = [*FLAGS, *(f"-I{SOURCE / folder}" for folder in _COMPILED)]
    flags += tensorflow_flags(directory)
    flags += toolkit.includes() if toolkit else []

    def compile_one(source):
        target = work / f"{source.parent.name}_{source.stem}.o"
        if source.suffix == ".cu":
            _run(toolkit.compile_command(command, source, target))
        else:
            _run([*command, *flags, "-c", source, "-o", target])
        return target

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources(toolkit, work)))
    cuda = toolkit.libraries() if toolkit else []
    framework = [f"-L{directory}", "-l:libtensorflow_framework.so.2"]
    _run([*command, "-shared", *objects, "-o", library, *cuda, *framework])


def _tensorflow_requirement():
    """Return the requirement that pyproject.toml states."""
    project = (SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8")
    return Requirement(re.search(r'^  "(tensorflow[<>=].*)",$', project, re.M).group(1))


def _stamp(version, command, toolkit):
    version_text = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, check=False
    ).stdout
    return {
        "tensorflow": version,
        "compiler": version_text.partition("\n")[0],
        "command": shlex.join([*command, *FLAGS]),
        "cuda": toolkit.describe() if toolkit else "",
        "sources": source_hash(),
    }


def _run(command):
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise CompileError(f"{shlex.join(map(str, command))}\n{result.stderr[-4000:]}")


def _wish():
    wish = os.environ.get("TF_DGC_NATIVE", "")
    if wish not in ("", "0", "1"):
        raise ValueError(
            "TF_DGC_NATIVE must be 1 (the native operations must be built), 0 (they "
            "must not) or unset (they are if possible). "
            f"Received: TF_DGC_NATIVE={wish}"
        )
    return wish
