#!/usr/bin/env bash
# The tests of TensorFlow's operations, with a sanitizer in the library that they load.
#
#   bash custom_ops/tests/sanitize_operations.sh address|thread [ARGUMENTS OF PYTEST]
#
# "address" includes undefined behaviour. It takes an environment with what the tests
# require, uses a copy of the package, and takes several minutes. TensorFlow itself is
# not instrumented: what is found is in our code, or in memory that ours has damaged.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
sanitizer=${1:?"address or thread"}
shift
case $sanitizer in
  # GCC cannot compile TensorFlow's headers with those three.
  address) library=libasan.so flags="-fsanitize=address,undefined -fno-sanitize-recover=all
           -fno-sanitize=null,nonnull-attribute,returns-nonnull-attribute" ;;
  thread) library=libtsan.so flags="-fsanitize=thread" ;;
  *) echo "The sanitizer must be address or thread. Received: $sanitizer" >&2; exit 2 ;;
esac

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$root/tf_dgc" "$copy"
rm -rf "$copy/tf_dgc/_native"
(
  cd "$root/custom_ops"
  # shellcheck disable=SC2086
  CXX="g++ -g $(echo $flags)" TF_DGC_CUDA=0 TF_DGC_LIBRARY="$copy" python - <<'PYTHON'
import os, pathlib
import builder

directory = pathlib.Path(os.environ["TF_DGC_LIBRARY"])
builder.build(directory / "tf_dgc" / "_native" / builder.LIBRARY, directory / "objects")
PYTHON
)

cd "$root"
export PYTHONPATH=$copy PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 TF_DGC_NATIVE=1
export ASAN_OPTIONS=detect_leaks=0  # Python and TensorFlow never free all
export TSAN_OPTIONS=ignore_noninstrumented_modules=1
export UBSAN_OPTIONS=print_stacktrace=1
export LD_PRELOAD="$(g++ -print-file-name=$library) $(g++ -print-file-name=libstdc++.so)"
python -c "import tf_dgc; assert tf_dgc.__file__.startswith('$copy'), tf_dgc.__file__"
python -m pytest -p no:cacheprovider --timeout 1200 tests/test_native.py "$@"
