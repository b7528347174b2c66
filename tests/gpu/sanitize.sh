#!/usr/bin/env bash
# Runs the small tests under NVIDIA's compute-sanitizer: tests/gpu/sanitize.sh [tool ...]
# SELECT chooses other tests (pytest -k), PYTHON another interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."

tools=("$@")
[[ $# -gt 0 ]] || tools=(memcheck racecheck synccheck initcheck)
make -s -C custom_ops cuda build/libtf_dgc_cpu.so
# Every array is a separate allocation, so that accesses outside of it are detected.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

for tool in "${tools[@]}"; do
  echo "== $tool"
  options=(--tool "$tool" --error-exitcode 99 --target-processes application-only
           --report-api-errors no)
  pytest=("${PYTHON:-python3}" -m pytest tests/gpu -q -p no:cacheprovider -o timeout=0
          -k "${SELECT:-small and not flipped}")
  if [[ $tool == initcheck ]]; then  # checks our kernels, with unwritten memory
    options+=(--kernel-name kns=tf_dgc)
    pytest+=(--no-poison)
  fi
  compute-sanitizer "${options[@]}" "${pytest[@]}"
done
