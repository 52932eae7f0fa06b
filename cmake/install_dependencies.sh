# SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and check.sh. install_dependencies [package...]: installs those Debian packages, and what every
# build here needs, if they are missing; does nothing if none is.
install_dependencies() {
  local needed=(g++ cmake ninja-build pkg-config libeigen3-dev nlohmann-json3-dev libcli11-dev libpcre2-dev)
  local missing=()
  for package in "${needed[@]}" "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q '^install ok installed$' || missing+=("$package")
  done
  [[ ${#missing[@]} -eq 0 ]] && return 0
  local sudo=()
  [[ $(id -u) -eq 0 ]] || sudo=(sudo)
  echo "Installing: ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}
