# SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and check.sh: installs the Debian packages that are missing, and nothing if none is.
install_dependencies() {
  local wanted=(g++ clang cmake ninja-build pkg-config python3 libeigen3-dev doctest-dev nlohmann-json3-dev libcli11-dev libpcre2-dev gnuplot-nox)
  local missing=()
  for package in "${wanted[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q '^install ok installed$' || missing+=("$package")
  done
  [[ ${#missing[@]} -eq 0 ]] && return 0
  local sudo=()
  [[ $(id -u) -eq 0 ]] || sudo=(sudo)
  echo "Installing: ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}
