#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds with g++ and clang++ (warnings are errors) and under the sanitizers, and passes the tests.
# Works on a fresh Debian 12. Options: --fast (g++ only).
set -euo pipefail
cd "$(dirname "$0")"
source cmake/install_dependencies.sh

jobs=$(nproc)
check() {  # name, cmake arguments...
  local name=$1
  shift
  echo "== $name"
  cmake -S . -B "build/$name" -G Ninja -DLOWRANKKV_WERROR=ON "$@" > "build/$name.cmake.log" 2>&1 || { cat "build/$name.cmake.log"; exit 1; }
  cmake --build "build/$name" -j "$jobs"
  ctest --test-dir "build/$name" -j "$jobs" --output-on-failure --no-tests=error
}

mkdir -p build
install_dependencies clang libclang-rt-dev python3 doctest-dev
check check-gcc -DCMAKE_CXX_COMPILER=g++
if [[ ${1:-} != --fast ]]; then
  # Without -march=native: the portable paths are compiled and tested here, with Eigen's assertions.
  check check-clang -DCMAKE_CXX_COMPILER=clang++ -DLOWRANKKV_NATIVE=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1
  check check-sanitizers -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-O1 -DLOWRANKKV_SANITIZE=address,undefined -DLOWRANKKV_CHECK_SOURCES=OFF -DLOWRANKKV_BUILD_EXAMPLES=OFF
fi
echo "All checks passed."
