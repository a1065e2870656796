#!/usr/bin/env bash
# Installs the Debian packages that are missing; touches neither network nor apt when none is.
# Usage: debian_packages.sh [--without-mpi] [--without-venv]
# Without root and sudo it prints the one line that root must run. It then stops, unless only packages
# that the build can do without are missing.
set -euo pipefail

required=(g++ cmake ninja-build git ca-certificates libcli11-dev libboost-json1.81-dev libssl-dev libgtest-dev)
optional=(ccache mold)
venv=(python3-venv python3-dev)
mpi=(libopenmpi-dev openmpi-bin iproute2)  # the last for tests with two hosts
for argument in "$@"; do
  case $argument in
    --without-mpi) mpi=() ;;
    --without-venv) venv=() ;;
    *) echo "debian_packages.sh: expected --without-mpi or --without-venv, got $argument" >&2; exit 2 ;;
  esac
done
required+=("${venv[@]}")
optional+=("${mpi[@]}")

missing_of() {
  for package in "$@"; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' ||
      echo "$package"
  done
}

if ! command -v dpkg-query >/dev/null; then
  echo "setup: this is no Debian; expected the equivalents of: ${required[*]} ${optional[*]}"
  exit 0
fi
missing_required=$(missing_of "${required[@]}" | xargs)
missing=$(missing_of "${required[@]}" "${optional[@]}" | xargs)
[ -n "$missing" ] || exit 0

line="apt-get update && apt-get install -y --no-install-recommends $missing"
export DEBIAN_FRONTEND=noninteractive
if [ "$(id -u)" = 0 ]; then
  echo "setup: $line"
  bash -c "$line"
elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
  echo "setup: sudo $line"
  sudo DEBIAN_FRONTEND=noninteractive bash -c "$line"
else
  echo "setup: packages are missing, and neither root nor sudo without a password is at hand. As root, run:" >&2
  echo "$line" >&2
  [ -z "$missing_required" ] || exit 1
  echo "setup: going on without them; they are optional" >&2
fi
