# SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and check.sh.
# What every build of the library and its examples needs.
build_packages=(g++ cmake ninja-build pkg-config libeigen3-dev nlohmann-json3-dev libcli11-dev libpcre2-dev libutf8proc-dev)

# install_dependencies package...: installs those Debian packages that are missing; does nothing if none is. Programs that came another way count.
install_dependencies() {
  local -A programs=([g++]=g++ [cmake]=cmake [ninja-build]=ninja [pkg-config]=pkg-config [python3]=python3)
  local missing=()
  for package in "$@"; do
    [[ -n ${programs[$package]:-} ]] && command -v "${programs[$package]}" > /dev/null && continue
    dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q '^install ok installed$' || missing+=("$package")
  done
  [[ ${#missing[@]} -eq 0 ]] && return 0
  local sudo=()
  [[ $(id -u) -eq 0 ]] || sudo=(sudo)
  echo "Installing: ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}
