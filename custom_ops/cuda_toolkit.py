"""Find and use nvcc for the kernels in `cuda/`; `builder.py` links what comes out.

The environment variable TF_DGC_CUDA decides: unset, the kernels are built if there is
nvcc; 1, building them must succeed; 0, they are not built. TF_DGC_CUDA_ARCHITECTURES
names the architectures, "80 90" by default; of the last one there is also PTX, which
newer GPUs compile when the library is loaded.

TF_DGC_TEST_DEVICE names the library of `test_device/`. Then the C++ compiler compiles
the kernels, for that device.
"""

import hashlib
import itertools
import os
import pathlib
import re
import shutil
import subprocess

_DEFAULT_ARCHITECTURES = "80 90"
_SOURCE = pathlib.Path(__file__).resolve().parent


class Toolkit:
    """An installed CUDA toolkit.

    Args:
        nvcc: path of the compiler.
        architectures: compute capabilities without a point, such as "90".
    """

    def __init__(self, nvcc, architectures):
        self.nvcc = str(nvcc)
        self.architectures = architectures
        self._root = pathlib.Path(nvcc).resolve().parents[1]

    def compile_command(self, host_command, source, target):
        """Return the command that compiles one .cu file into an object file.

        Args:
            host_command: the C++ compiler for the host's part, as a list of arguments;
                it may begin with a launcher, as in `ccache g++ -m64`.
            source: the file.
            target: the object file.
        """
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in self.architectures]
        last = self.architectures[-1]
        codes.append(f"-gencode=arch=compute_{last},code=compute_{last}")
        # No fused multiply-add, and denormals are zero: the CPU operations' bits.
        flags = ["-std=c++17", "-O3", "-fmad=false", "-ftz=true"]
        programs = list(itertools.takewhile(lambda w: w[0] != "-", host_command))
        options = [*host_command[len(programs) :], "-fPIC", "-fvisibility=hidden"]
        # nvcc takes a compiler, and cannot call one through another program.
        host = ["-ccbin", programs[-1], *(f"-Xcompiler={o}" for o in options)]
        folders = ("cpu", "cuda", "cuda_engine", "engine", "methods")
        includes = [f"-I{source.parents[1] / folder}" for folder in folders]
        return [self.nvcc, *flags, *codes, *host, *includes, "-c", source, "-o", target]

    def sources(self):
        """Return further files to compile."""
        return []

    def includes(self):
        """Return compiler flags for the CUDA headers."""
        directory = self._root / "include"
        found = (directory / "cuda_runtime_api.h").exists()
        return ["-isystem", str(directory)] if found else []

    def libraries(self):
        """Return linker flags; they go before those of TensorFlow.

        TensorFlow's framework library exports stubs of the same names.
        """
        directories = [self._root / "lib64", self._root / "lib"]
        found = [f"-L{d}" for d in directories if (d / "libcudart_static.a").exists()]
        return [*found, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]

    def describe(self):
        """Return version and architectures, for the stamp."""
        text = subprocess.run(
            [self.nvcc, "--version"], capture_output=True, text=True, check=True
        ).stdout
        version = re.search(r"release ([\d.]+)", text)
        names = [f"sm_{a}" for a in self.architectures]
        names.append(f"PTX {self.architectures[-1]}")
        return f"{version.group(1) if version else 'unknown'} ({', '.join(names)})"


class TestDevice:
    """The test device, with the interface of `Toolkit`.

    Args:
        library: path of its library.
    """

    def __init__(self, library):
        self._library = pathlib.Path(library).resolve()

    def compile_command(self, host_command, source, target):
        """Return the command that compiles one .cu file into an object file."""
        flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden"]
        # The same bits as the CPU operations (`builder.FLAGS`).
        flags += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
        folders = ("cpu", "cuda", "cuda_engine", "engine", "methods", "tests")
        includes = [f"-I{_SOURCE / folder}" for folder in folders]
        return [
            *host_command,
            *flags,
            *includes,
            "-x",
            "c++",
            "-c",
            source,
            "-o",
            target,
        ]

    def sources(self):
        """Return further files to compile."""
        return [_SOURCE / "test_device" / "boundary.cc"]

    def includes(self):
        """Return compiler flags for its CUDA headers."""
        return [f"-I{_SOURCE / 'test_device'}"]

    def libraries(self):
        """Return linker flags."""
        wrapped = ("compress", "decode", "encode", "sum")
        wraps = [f"-Wl,--wrap=tf_dgc_cuda_{name}" for name in wrapped]
        return [*wraps, str(self._library), f"-Wl,-rpath,{self._library.parent}"]

    def describe(self):
        """Return what the stamp says of it."""
        digest = hashlib.sha256()
        for folder in ("test_device", "tests"):
            for path in sorted((_SOURCE / folder).iterdir()):
                digest.update(path.read_bytes())
        return f"none (test device {digest.hexdigest()[:12]})"


def find():
    """Return the toolkit to build with, or None.

    Raises:
        ValueError: if TF_DGC_CUDA or TF_DGC_CUDA_ARCHITECTURES has no meaning.
        FileNotFoundError: if TF_DGC_CUDA=1 asks for a toolkit that is not there.
    """
    if wish() == "0":
        return None
    if os.environ.get("TF_DGC_TEST_DEVICE"):
        return TestDevice(os.environ["TF_DGC_TEST_DEVICE"])
    architectures = re.split(
        r"[\s,;]+",
        os.environ.get("TF_DGC_CUDA_ARCHITECTURES", _DEFAULT_ARCHITECTURES).strip(),
    )
    if not all(re.fullmatch(r"\d{2,3}[af]?", a) for a in architectures):
        raise ValueError(
            "TF_DGC_CUDA_ARCHITECTURES must hold compute capabilities without a point, "
            'such as "80 90". Received: TF_DGC_CUDA_ARCHITECTURES='
            f"{os.environ['TF_DGC_CUDA_ARCHITECTURES']}"
        )
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [f"{home}/bin/nvcc" for home in homes if home] + ["nvcc"]
    nvcc = next((found for c in candidates if (found := shutil.which(c))), None)
    if nvcc is None and wish() == "1":
        raise FileNotFoundError(
            "TF_DGC_CUDA=1 asks for the CUDA kernels, but there is no nvcc in "
            "CUDA_HOME, /usr/local/cuda or PATH"
        )
    return Toolkit(nvcc, architectures) if nvcc else None


def wish():
    """Return what TF_DGC_CUDA says: "", "0" or "1"."""
    value = os.environ.get("TF_DGC_CUDA", "")
    if value not in ("", "0", "1"):
        raise ValueError(
            "TF_DGC_CUDA must be 1 (the CUDA kernels must be built), 0 (they must not) "
            f"or unset (they are if there is nvcc). Received: TF_DGC_CUDA={value}"
        )
    return value
