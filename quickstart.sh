#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds, and measures every method on a small real model. Works on a fresh Debian 12.
set -euo pipefail
cd "$(dirname "$0")"
source cmake/install_dependencies.sh

mkdir -p build
install_dependencies "${build_packages[@]}" gnuplot-nox
cmake -S . -B build/release -G Ninja -DLOWRANKKV_BUILD_TESTS=OFF > build/release.cmake.log 2>&1 || { cat build/release.cmake.log; exit 1; }
cmake --build build/release -j "$(nproc)"
exec build/release/examples/quickstart/lowrankkv-quickstart --threads "$(nproc)" "$@"
