"""What setuptools does otherwise: libraries of operations are no Python modules."""

import os
import pathlib
import shutil

from builder import LIBRARY, SOURCE, STAMP, build, wish
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


class BuildNative(build_ext):
    """Builds libraries of operations, which are no Python modules."""

    def get_ext_filename(self, fullname):
        """Return the folder of all libraries, in place of a file."""
        return os.path.join(*fullname.split("."))

    def build_extension(self, ext):
        """Compile and link; without TF_DGC_NATIVE=1 a failure is only reported."""
        built = []
        try:
            built = build(self._folder(), pathlib.Path(self.build_temp))
        except CompileError as error:
            if wish() == "1":
                raise
            self.announce(
                f"tf_dgc is installed without its native operations: {error}", level=3
            )
        for folder in self._folder().glob("*"):  # an earlier build's, of other sources
            if folder.name not in built:
                shutil.rmtree(folder)

    def get_outputs(self):
        """Return the files there are."""
        return [str(path) for path in self._built()]

    def get_output_mapping(self):
        """Return where the files of an editable installation go."""
        here = {str(path): str(_in_source_tree(path)) for path in self._built()}
        return here if self.inplace else {}

    def copy_extensions_to_source(self):
        """Put libraries and stamps into the source tree (editable install)."""
        for path in self._built():
            new = _in_source_tree(path)
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, f"{new}.new")
            # Programs that run keep the file they have loaded.
            os.replace(f"{new}.new", new)

    def _built(self):
        return sorted(
            p for p in self._folder().glob("*/*") if p.name in (LIBRARY, STAMP)
        )

    def _folder(self):
        return pathlib.Path(self.build_lib) / "tf_dgc" / "_native"


def _in_source_tree(path):
    return SOURCE.parent / "tf_dgc" / "_native" / path.parent.name / path.name


class WheelForAnyPython(bdist_wheel):
    """Names the wheel after the machine alone: what is compiled knows no Python."""

    def get_tag(self):
        """Return the tags of Python, its binary interface and the platform."""
        platform = super().get_tag()[2]
        return "py3", "none", platform
