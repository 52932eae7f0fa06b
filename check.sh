#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds with g++ (warnings are errors) and passes the tests. Works on a fresh Debian 12.
# Where nvcc is, the CUDA sources are compiled for one architecture and the kernels run emulated; on a GPU too, where there is one.
#
#   bash check.sh               what has to pass before every commit: 20 to 30 minutes on two cores with nvcc
#   bash check.sh --full        that, and every part below: before a release
#   bash check.sh --part NAME   one part alone; --list names them
#   bash check.sh --cuda        the tests of the CUDA backend alone, on the GPU at hand (LOWRANKKV_TEST_EFFORT=0: fewer random cases)
set -euo pipefail
cd "$(dirname "$0")"
source cmake/install_dependencies.sh

declare -A parts=(
  [sanitizers]="tests by clang++ without -march=native; what handles memory under the address and undefined-behaviour sanitizers, threads under that of threads"
  [headers]="every header compiles alone, CUDA headers too; misuse of a policy gives one readable line; clang-tidy over everything"
  [packages]="consumers: CMake, pkg-config, Conan; the reference of every header"
  [architectures]="every kernel that a preset can reach, assembled for sm_80 and sm_90; the CUDA tests read for compute_80; examples and benchmarks with CUDA"
  [fuzz]="fuzz targets: 10 seconds for each reader of files that are not trusted, under sanitizers"
  [random]="the kernel tests that run emulated and that the check leaves out, and long random operation sequences"
)
order=(packages sanitizers headers architectures fuzz random)

jobs=$(nproc)
nvcc=$(command -v nvcc || { [[ -x /usr/local/cuda/bin/nvcc ]] && echo /usr/local/cuda/bin/nvcc; } || true)
cuda=(-DLOWRANKKV_CUDA=OFF)
[[ -z $nvcc ]] || cuda=(-DLOWRANKKV_CUDA=ON "-DCMAKE_CUDA_COMPILER=$nvcc" -DLOWRANKKV_EXAMPLE_HEAD_DIM=64)
# CUDA programs that are compiled to be checked, not to run: with the least work for the assembler and the host's compiler.
# The middle of nvcc does some, since the others have more to read otherwise.
unused_gpu_code="-DCMAKE_CUDA_FLAGS_RELEASE=-O0 -DNDEBUG -Xcicc=-O1 -Xptxas=-O0"
check_cuda=(-DLOWRANKKV_CUDA_PTX_ONLY=OFF)
# Flags with which nvcc reads device code, with all its templates, and compiles no code of it; empty for an nvcc without.
syntax=""
[[ -z $nvcc || $("$nvcc" --help) != *--fdevice-syntax-only* ]] || syntax=-fdevice-syntax-only
# Where no GPU is, the tests' kernels are compiled to PTX. The example engine's are read alone: the part architectures assembles them.
nvidia-smi -L > /dev/null 2>&1 || check_cuda=(-DLOWRANKKV_CUDA_PTX_ONLY=ON "$unused_gpu_code" "-DLOWRANKKV_CUDA_EXAMPLE_FLAGS=$syntax")
# The check and the part architectures compile some host sources with the same flags: what one has compiled is kept for the
# other, by what the compiler was given and read.
export CCACHE_DIR=$PWD/build/ccache CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1 CCACHE_MAXSIZE=1G
host_flags=(-DLOWRANKKV_TEST_FLAGS=-Og -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)

# configure NAME [cmake arguments...]
configure() {
  local name=$1
  shift
  mkdir -p build
  cmake -S . -B "build/$name" -G Ninja -DLOWRANKKV_WERROR=ON "$@" > "build/$name.cmake.log" 2>&1 || { cat "build/$name.cmake.log"; exit 1; }
}
# build NAME [cmake arguments...]
build() {
  configure "$@"
  cmake --build "build/$1" -j "$jobs"
}
# run_tests NAME [ctest arguments...]
run_tests() {
  local name=$1
  shift
  ctest --test-dir "build/$name" -j "$jobs" --output-on-failure --no-tests=error "$@"
}

# python_package NAME...: packages from the Python registry, in build/tools. Says so where they cannot be installed.
python_package() {
  local tools=$PWD/build/tools
  mkdir -p build
  { { [[ -x $tools/bin/pip ]] || python3 -m venv "$tools"; } && timeout 300 "$tools/bin/pip" install --quiet "$@"; } \
    > build/tools.log 2>&1 || echo "Not installed, and not tested with: $* (build/tools.log)"
}

configure_check() {
  install_dependencies "${build_packages[@]}" ccache python3 python3-venv doctest-dev clang-format-14 clang-tidy-14
  python_package tokenizers numpy safetensors
  local python=()
  [[ ! -x build/tools/bin/python ]] || python=("-DLOWRANKKV_PYTHON=$PWD/build/tools/bin/python")
  [[ -n $nvcc ]] || echo "No nvcc: the CUDA backend is not compiled."
  configure check "${host_flags[@]}" -DCMAKE_CUDA_ARCHITECTURES=90 \
    "${cuda[@]}" "${check_cuda[@]}" "${python[@]}" "$@"
}
check() {
  configure_check -DLOWRANKKV_EMULATED=short -DLOWRANKKV_EMULATED_EFFORT=0
  cmake --build build/check -j "$jobs"
  run_tests check
}

part_sanitizers() {
  install_dependencies "${build_packages[@]}" clang libclang-rt-dev python3 doctest-dev
  # Examples and their tests run in the check; what clang++ has to say of them, clang-tidy does (part headers).
  build check-sanitizers -DLOWRANKKV_TESTS=programs -DLOWRANKKV_BUILD_EXAMPLES=OFF -DCMAKE_CXX_COMPILER=clang++ -DLOWRANKKV_NATIVE=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DLOWRANKKV_SANITIZE=address,undefined
  local sequences='^(policies|policies_baselines|op_sequences)$'  # of the usual size in the check
  run_tests check-sanitizers -E "$sequences"
  LOWRANKKV_TEST_SMALL=1 LOWRANKKV_TEST_EFFORT=2 run_tests check-sanitizers -R "$sequences"
  configure check-threads -DLOWRANKKV_TESTS=programs -DLOWRANKKV_BUILD_EXAMPLES=OFF -DCMAKE_CXX_COMPILER=clang++ -DLOWRANKKV_NATIVE=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DLOWRANKKV_SANITIZE=thread
  cmake --build build/check-threads --target test_layer_stack_threads
  TSAN_OPTIONS=halt_on_error=1 run_tests check-threads -R '^layer_stack_threads$'
}

part_headers() {
  install_dependencies "${build_packages[@]}" clang clang-tidy-14 python3 doctest-dev
  local compiler with_cuda=("${cuda[@]}")
  for compiler in g++ clang++; do
    build "check-headers-$compiler" -DCMAKE_CXX_COMPILER="$compiler" -DLOWRANKKV_TESTS=headers -DLOWRANKKV_BUILD_EXAMPLES=OFF "${with_cuda[@]}"
    run_tests "check-headers-$compiler"
    with_cuda=(-DLOWRANKKV_CUDA=OFF)  # nvcc's host compiler is the same in both
  done
}

part_packages() {
  install_dependencies "${build_packages[@]}" doxygen python3 python3-venv doctest-dev
  local tools=$PWD/build/tools conan=()
  python_package 'conan>=2,<3'
  [[ ! -x $tools/bin/conan ]] || conan=("-DLOWRANKKV_CONAN=$tools/bin/conan")
  build check-packages -DLOWRANKKV_TESTS=packages -DLOWRANKKV_BUILD_EXAMPLES=OFF "${cuda[@]}" "${conan[@]}"
  run_tests check-packages
}

part_architectures() {  # nothing of CUDA runs here but what is host code; with a GPU, the check runs the rest
  install_dependencies "${build_packages[@]}" ccache libbenchmark-dev python3 doctest-dev
  if [[ -z $nvcc ]]; then
    build check-architectures "${host_flags[@]}" -DLOWRANKKV_BUILD_TESTS=OFF -DLOWRANKKV_BUILD_BENCHMARKS=ON "${cuda[@]}"
    return
  fi
  # Example 09 needs NCCL.
  python_package nvidia-nccl-cu13
  local nccl=(build/tools/lib/python3*/site-packages/nvidia/nccl)
  # The benchmarks' kernels are those of presets and of the tests, and the tests' are compiled in the check: nvcc reads them
  # here for compute_80, and compiles no code of them. The examples' are presets' too: assembled for one architecture.
  build check-architectures -DLOWRANKKV_BUILD_BENCHMARKS=ON "-DLOWRANKKV_TESTS=gpu;kernels" "${host_flags[@]}" \
    -DCMAKE_CUDA_ARCHITECTURES=80-virtual "-DLOWRANKKV_PROGRAM_ARCHITECTURES=80-real;90-real" -DLOWRANKKV_EXAMPLE_ARCHITECTURES=90-real "${cuda[@]}" "$unused_gpu_code" \
    "-DLOWRANKKV_NCCL=$PWD/${nccl[0]}" "-DLOWRANKKV_CUDA_BENCHMARK_FLAGS=$syntax" "-DLOWRANKKV_CUDA_TEST_FLAGS=$syntax"
  run_tests check-architectures -R '^cuda_host_code$'
}

part_fuzz() {  # LOWRANKKV_FUZZ_SECONDS=600: longer
  install_dependencies "${build_packages[@]}" clang libclang-rt-dev python3 doctest-dev
  build check-fuzz -DCMAKE_CXX_COMPILER=clang++ -DLOWRANKKV_NATIVE=OFF -DLOWRANKKV_TESTS=fuzz -DLOWRANKKV_BUILD_EXAMPLES=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DLOWRANKKV_SANITIZE=address,undefined "${cuda[@]}" "-DLOWRANKKV_FUZZ_SECONDS=${LOWRANKKV_FUZZ_SECONDS:-10}"
  run_tests check-fuzz
}

part_random() {  # LOWRANKKV_EMULATED_EFFORT=1: every emulated test, with as many cases as on a GPU
  local effort=${LOWRANKKV_EMULATED_EFFORT:-0} targets=(test_policies test_op_sequences test_cache_laws) emulated=(-L '^rest$')
  [[ $effort == 0 ]] || emulated=(-R '^cuda_emulated')
  configure_check -DLOWRANKKV_EMULATED=all "-DLOWRANKKV_EMULATED_EFFORT=$effort"
  [[ -z $nvcc ]] || targets+=(lowrankkv_emulated_rest)
  [[ -z $nvcc || $effort == 0 ]] || targets+=(all)
  cmake --build build/check -j "$jobs" --target "${targets[@]}"
  LOWRANKKV_TEST_EFFORT=2 run_tests check -R '^(policies|op_sequences|cache_laws)$'
  LOWRANKKV_TEST_EFFORT=20 LOWRANKKV_TEST_SMALL=1 LOWRANKKV_TEST_SEED=1 run_tests check -R '^(policies|op_sequences)$'
  [[ -z $nvcc ]] || run_tests check "${emulated[@]}"
}

# timed COMMAND...: runs it and says how long it took. On a machine that does other work, the processors' time says more.
timed() {
  local TIMEFORMAT="== $*: %0R s; processors: %0U s, and %0S s in the system"
  echo "== $*"
  time "$@"
}

case ${1:-} in
  "") timed check ;;
  --full)
    timed check
    for part in "${order[@]}"; do timed "part_$part"; done
    ;;
  --part)
    [[ -n ${parts[${2:-}]:-} ]] || { echo "check.sh --part: '${2:-}' is none of ${order[*]}" >&2; exit 2; }
    timed "part_$2"
    ;;
  --list)
    for part in "${order[@]}"; do echo "$part: ${parts[$part]}"; done
    exit 0
    ;;
  --cuda)
    install_dependencies g++ cmake ninja-build libeigen3-dev doctest-dev python3
    [[ -n $nvcc ]] || { echo "check.sh --cuda: no nvcc on the path or in /usr/local/cuda/bin" >&2; exit 1; }
    build check-cuda -DLOWRANKKV_BUILD_EXAMPLES=OFF -DLOWRANKKV_TESTS=gpu -DCMAKE_CUDA_ARCHITECTURES=native "${cuda[@]}"
    LOWRANKKV_REQUIRE_GPU=1 run_tests check-cuda
    ;;
  *) echo "check.sh: unknown option '$1'; there are --full, --part NAME, --list, --cuda" >&2; exit 2 ;;
esac
echo "All checks passed."
