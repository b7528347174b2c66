"""Compile the native operations while the package is built.

A library belongs to one minor version of TensorFlow, in a folder of that name. A stamp
beside it says what it is for, with a checksum; `tf_dgc/native_library.py` reads it
before loading.

The environment variable TF_DGC_NATIVE decides: unset, the library is built if there is
a compiler, and the package works without it; 1, building it must succeed; 0, it is
not built. TF_DGC_TENSORFLOW names folders with a TensorFlow in each, separated as in
PATH, and there is a library for every one of them; unset, for the one that is
installed. CXXFLAGS come behind the flags below. What is said of CUDA in
`cuda_toolkit.py` comes on top.
"""

import concurrent.futures
import hashlib
import itertools
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
from packaging.specifiers import SpecifierSet
from setuptools import Extension
from setuptools.errors import CompileError

SOURCE = pathlib.Path(__file__).resolve().parent
LIBRARY = "libtf_dgc_ops.so"
STAMP = "stamp.json"
_FOLDERS = "TF_DGC_TENSORFLOW"
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
    if wish() == "0" or (wish() != "1" and compiler() is None):
        return []
    return [Extension("tf_dgc._native", [])]


def build_requirements():
    """Return TensorFlow's requirement if it must be brought in to build against.

    A TensorFlow that is installed already is the one that the library is for.
    """
    if not extensions() or find_tensorflows():
        return []
    return [str(_tensorflow_requirement())]


def compiler():
    """Return the C++ compiler as a list of arguments, or None.

    It is what CXX says, and g++ if CXX is not set or empty.
    """
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    return command if shutil.which(command[0]) else None


def find_tensorflows():
    """Return directory and version of every TensorFlow to build against.

    One in each folder of TF_DGC_TENSORFLOW. If that is not set, the one that is
    installed, or none: it is looked for where this build runs (an isolated environment,
    perhaps) and where the package is going to be installed. It is not imported.

    Raises:
        CompileError: if there is none in one of these folders.
    """
    folders = [f for f in os.environ.get(_FOLDERS, "").split(os.pathsep) if f]
    if not folders:
        installed = (sysconfig.get_paths()[p] for p in ("purelib", "platlib"))
        tensorflows = filter(None, map(_tensorflow_in, [*sys.path, *installed]))
        return list(itertools.islice(tensorflows, 1))
    tensorflows = [_tensorflow_in(folder, untested=True) for folder in folders]
    if None in tensorflows:
        raise CompileError(
            f"{_FOLDERS} must name folders with a {_tensorflow_requirement()} in each. "
            f"There is none in {folders[tensorflows.index(None)]}"
        )
    return tensorflows


def _tensorflow_in(folder, untested=False):
    """Return directory and version of a supported TensorFlow, or of a newer one."""
    supported = _tensorflow_requirement().specifier
    if untested:
        supported = SpecifierSet(",".join(str(s) for s in supported if ">" in str(s)))
    names = ("tensorflow", "tensorflow-cpu")
    for found in itertools.chain.from_iterable(
        metadata.distributions(name=name, path=[folder]) for name in names
    ):
        directory = pathlib.Path(folder) / "tensorflow"
        is_supported = supported.contains(found.version, prereleases=untested)
        if is_supported and (directory / "include").is_dir():
            return directory, found.version
    return None


def minor(version):
    """Return the name of a library's folder, such as 2.21."""
    return ".".join(version.split(".")[:2])


def tensorflow_flags(directory):
    """Return the compiler flags for the headers of the TensorFlow in `directory`."""
    return [
        *("-isystem", str(directory / "include")),
        "-D_GLIBCXX_USE_CXX11_ABI=1",
        "-DEIGEN_MAX_ALIGN_BYTES=64",
        "-Wno-deprecated-declarations",  # its own mutex
    ]


def sources(cuda):
    """Return the files that include no header of TensorFlow, the slowest first."""
    patterns = ["cuda*/*.cu"] if cuda else []
    more = cuda.sources() if cuda else []
    return [*_files([*patterns, "methods/*.cc", "cpu/*.cc", "engine/*.cc"]), *more]


def tensorflow_sources(cuda, work):
    """Return the files that do.

    TensorFlow's headers take longer than what is behind them, so that all files for
    CPUs are one, in the directory `work`.
    """
    together = work / "with_tensorflow.cc"
    together.write_text(
        "".join(f'#include "{path}"\n' for path in _files(["tensorflow/[!g]*.cc"]))
    )
    return [together, *_files(["tensorflow/gpu_*.cc"] if cuda else [])]


def _files(patterns):
    return [path for pattern in patterns for path in sorted(SOURCE.glob(pattern))]


def source_hash():
    """Return a hash of everything that is compiled."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.glob("*/*")):
        if path.parent.name in _COMPILED and path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(native, work):
    """Build a library and its stamp for every TensorFlow found, in a folder of each.

    Nothing is done for what is there already, built of the same in the same way.

    Args:
        native: path of the folder of these folders.
        work: path of the folder for object files.

    Returns:
        Names of the folders in which there is a library now.
    """
    command = compiler()
    if command is None:
        raise CompileError("there is no C++ compiler (g++, or what CXX names)")
    found = find_tensorflows()
    if not found:
        raise CompileError(f"there is no {_tensorflow_requirement()} to build against")
    try:
        toolkit = cuda_toolkit.find()
    except (FileNotFoundError, ValueError) as error:
        raise CompileError(str(error)) from error
    try:
        _build_with(command, found, toolkit, native, work)
    except CompileError as error:
        if toolkit is None or cuda_toolkit.wish() == "1":
            raise
        print(f"tf_dgc is built without its CUDA kernels: {error}", file=sys.stderr)
        _build_with(command, found, None, native, work)
    return [minor(version) for _, version in found]


def _build_with(command, found, toolkit, native, work):
    """Build, with CUDA kernels or without, what is not there yet."""
    stamps = {
        native / minor(version) / LIBRARY: _stamp(version, command, toolkit)
        for _, version in found
    }
    missing = {
        library: directory
        for (library, stamp), (directory, _) in zip(stamps.items(), found, strict=True)
        if not _is_built(library, stamp)
    }
    if missing:
        _compile_and_link(command, missing, toolkit, work)
    for library in missing:
        text = json.dumps(_sealed(stamps[library], library), indent=2)
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


def _compile_and_link(command, libraries, toolkit, work):
    """Build every library against its TensorFlow; `libraries` are folders by path."""
    flags = [*_flags(), *(f"-I{SOURCE / folder}" for folder in _COMPILED)]
    flags += toolkit.includes() if toolkit else []

    def compile_one(source, folder, more):
        target = folder / f"{source.parent.name}_{source.stem}.o"
        if source.suffix == ".cu":
            _run(toolkit.compile_command(command, source, target))
        else:
            _run([*command, *flags, *more, "-c", source, "-o", target])
        return target

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {}
        for library, directory in libraries.items():
            folder = work / library.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            jobs[library] = [
                pool.submit(compile_one, source, folder, tensorflow_flags(directory))
                for source in tensorflow_sources(toolkit, folder)
            ]
        common = [
            pool.submit(compile_one, source, work, []) for source in sources(toolkit)
        ]
        objects = {
            library: [job.result() for job in [*own, *common]]
            for library, own in jobs.items()
        }
    cuda = toolkit.libraries() if toolkit else []
    for library, directory in libraries.items():
        library.parent.mkdir(parents=True, exist_ok=True)
        framework = [f"-L{directory}", "-l:libtensorflow_framework.so.2"]
        shared = [*command, "-shared", *objects[library], "-o", library]
        _run([*shared, *cuda, *framework])


def _flags():
    return [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]


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
        "command": shlex.join([*command, *_flags()]),
        "cuda": toolkit.describe() if toolkit else "",
        "sources": source_hash(),
    }


def _run(command):
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise CompileError(f"{shlex.join(map(str, command))}\n{result.stderr[-4000:]}")


def wish():
    """Return TF_DGC_NATIVE, which is "" if it is not set."""
    wish = os.environ.get("TF_DGC_NATIVE", "")
    if wish not in ("", "0", "1"):
        raise ValueError(
            "TF_DGC_NATIVE must be 1 (the native operations must be built), 0 (they "
            "must not) or unset (they are if possible). "
            f"Received: TF_DGC_NATIVE={wish}"
        )
    return wish
