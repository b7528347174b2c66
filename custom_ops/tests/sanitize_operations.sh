#!/usr/bin/env bash
# The tests of TensorFlow's operations, with sanitizers in the library that they load.
#
#   bash custom_ops/tests/sanitize_operations.sh address|thread [ARGUMENTS OF PYTEST]
#
# `address` is for undefined behaviour too. It takes an environment with what the tests
# require, uses a copy of the package, and takes several minutes. TensorFlow itself is not
# instrumented: what is found is in our code, or in memory that ours has damaged.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
kind=${1:-}
case $kind in
  address)
    flags="-fsanitize=address,undefined -fno-sanitize-recover=all"
    # GCC cannot compile TensorFlow's headers with these three.
    flags="$flags -fno-sanitize=null,nonnull-attribute,returns-nonnull-attribute"
    library=libasan.so
    ;;
  thread)
    flags="-fsanitize=thread"
    library=libtsan.so
    ;;
  *)
    sed -n '2,8s/^# \?//p' "$0" >&2
    exit 2
    ;;
esac
shift

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$root/tf_dgc" "$copy"
rm -rf "$copy/tf_dgc/_native"
(
  cd "$root/custom_ops"
  CXX="g++ -g1 $flags" TF_DGC_CUDA=0 TF_DGC_LIBRARY="$copy" python - <<'PYTHON'
import os, pathlib
import builder

builder.FLAGS[builder.FLAGS.index("-O3")] = "-O1"  # as `make check`
directory = pathlib.Path(os.environ["TF_DGC_LIBRARY"])
builder.build(directory / "tf_dgc" / "_native", directory / "objects")
PYTHON
)

cd "$root"
export PYTHONPATH=$copy PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 TF_DGC_NATIVE=1
export ASAN_OPTIONS=detect_leaks=0  # Python and TensorFlow never free all
export UBSAN_OPTIONS=print_stacktrace=1
# pytest hides what is printed while a test runs.
export TSAN_OPTIONS="ignore_noninstrumented_modules=1 log_path=$copy/report"
LD_PRELOAD="$(g++ -print-file-name=$library) $(g++ -print-file-name=libstdc++.so)"
export LD_PRELOAD
python -c "import tf_dgc; assert tf_dgc.__file__.startswith('$copy'), tf_dgc.__file__"
status=0
python -m pytest -p no:cacheprovider --timeout 1200 tests/steps/test_native.py "$@" || status=$?
unset LD_PRELOAD
if compgen -G "$copy/report.*" >/dev/null; then
  cat "$copy"/report.*
  status=1
fi
exit $status
