#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds with g++ and with clang++ (warnings are errors; what handles memory under the sanitizers there), and passes the tests.
# Works on a fresh Debian 12. Where nvcc is, the CUDA backend is compiled too; its tests run where there is a GPU.
# Options: --fast (g++ only), --cuda (the tests of the CUDA backend alone, for the GPU at hand, which must be there; LOWRANKKV_TEST_EFFORT=0: fewer random cases).
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
nvcc=$(command -v nvcc || { [[ -x /usr/local/cuda/bin/nvcc ]] && echo /usr/local/cuda/bin/nvcc; } || true)
cuda=(-DLOWRANKKV_CUDA=OFF)
[[ -z $nvcc ]] || cuda=(-DLOWRANKKV_CUDA=ON "-DCMAKE_CUDA_COMPILER=$nvcc")
if [[ ${1:-} == --cuda ]]; then
  install_dependencies g++ cmake ninja-build libeigen3-dev doctest-dev python3
  [[ -n $nvcc ]] || { echo "check.sh --cuda: no nvcc on the path or in /usr/local/cuda/bin" >&2; exit 1; }
  name=check-cuda
  cmake -S . -B "build/$name" -G Ninja -DLOWRANKKV_WERROR=ON -DLOWRANKKV_BUILD_EXAMPLES=OFF -DLOWRANKKV_CHECK_SOURCES=OFF -DCMAKE_CUDA_ARCHITECTURES=native "${cuda[@]}" > "build/$name.cmake.log" 2>&1 || { cat "build/$name.cmake.log"; exit 1; }
  cmake --build "build/$name" -j "$jobs" --target test_cuda_layout test_cuda_cache
  LOWRANKKV_REQUIRE_GPU=1 ctest --test-dir "build/$name" -R '^cuda_(layout|cache)$' --output-on-failure --no-tests=error
  exit 0
fi
install_dependencies "${build_packages[@]}" clang libclang-rt-dev doxygen python3 python3-venv doctest-dev
[[ -n $nvcc ]] || echo "No nvcc: the CUDA backend is not compiled."
# Where there is no GPU the CUDA programs are compiled to be checked, not to run: with the least work for the assembler and the host's compiler. The middle of nvcc does some, since the others have more to read otherwise.
nvidia-smi -L > /dev/null 2>&1 || cuda+=("-DCMAKE_CUDA_FLAGS_RELEASE=-O0 -DNDEBUG -Xcicc=-O1 -Xptxas=-O0")
tools=$PWD/build/tools
if [[ ! -x $tools/bin/conan ]]; then
  { python3 -m venv "$tools" && timeout 300 "$tools/bin/pip" install 'conan>=2,<3'; } > build/tools.log 2>&1 || echo "No Conan: its recipe is not tested (build/tools.log)."
fi
conan=()
[[ ! -x $tools/bin/conan ]] || conan=("-DLOWRANKKV_CONAN=$tools/bin/conan")
# The example engine as users have it; the tests, most of the work, with less optimisation: it is their compilation that takes the time.
check check-gcc -DCMAKE_CXX_COMPILER=g++ -DLOWRANKKV_TEST_FLAGS=-O1 "${cuda[@]}" "${conan[@]}"
if [[ ${1:-} != --fast ]]; then
  # Without -march=native: the portable paths are compiled and tested here, with Eigen's assertions.
  check check-clang -DCMAKE_CXX_COMPILER=clang++ -DLOWRANKKV_NATIVE=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DLOWRANKKV_SANITIZE=address,undefined
fi
echo "All checks passed."
