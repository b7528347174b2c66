"""`tf_dgc.multiworker` does not import the compression of gradients."""

import pathlib
import subprocess
import sys

import pytest

import tf_dgc

PACKAGE = pathlib.Path(tf_dgc.__file__).parent

IMPORT_MULTIWORKER = """
import importlib, pathlib, sys, types

package = types.ModuleType("tf_dgc")  # without its `__init__`, which imports everything
package.__path__ = [sys.argv[1]]
sys.modules["tf_dgc"] = package

for path in sorted(pathlib.Path(sys.argv[1], "multiworker").rglob("*.py")):
    parts = path.relative_to(sys.argv[1]).with_suffix("").parts
    if parts[-1] != "__main__":
        importlib.import_module(".".join(["tf_dgc", *parts]).removesuffix(".__init__"))

folders = {name.split(".")[1] for name in sys.modules if name.startswith("tf_dgc.")}
print(*sorted(folders))
"""


@pytest.mark.slow
def test_multiworker_imports_no_compression():
    finished = subprocess.run(
        [sys.executable, "-c", IMPORT_MULTIWORKER, str(PACKAGE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    imported = set(finished.stdout.split())
    assert "multiworker" in imported
    assert imported <= {
        "_internals",
        "arguments",
        "conditions",
        "multiworker",
        "native_library",
    }
