#!/usr/bin/env bash
# Build the C++ kernels with the address and undefined-behaviour sanitizers and run their tests with them.
# Needs .venv (make install), g++ and its libasan. The build stays in build/sanitize, which git ignores.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$PWD/.venv/bin/python}
export PATH="$(dirname "$python"):$PATH"

cmake -S . -B build/sanitize -G Ninja -DRECSYS_SANITIZE=ON -DPython_EXECUTABLE="$python" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)"
cmake --build build/sanitize

# Python itself is not built with the sanitizers: their library must be there first, and its leaks are not ours.
# RECSYS_KERNELS names the folder of the module to load in place of the installed one.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 RECSYS_KERNELS="$PWD/build/sanitize" \
  "$python" -m pytest tests/kernels tests/embeddings/test_bags.py tests/embeddings/test_weights.py \
  tests/row_optimizers/test_storage.py tests/dense_optimizers/test_balanced_kernel.py "$@"
