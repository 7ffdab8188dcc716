#!/bin/sh
# Installs what tests run beside Python: a Chromium, curl, promtool, what makes machines; `tools.sh browsers` what make walk-browsers runs.
# On Debian and its kin, by root; anybody else is told.
set -eu

there() {
  for name in "$@"; do
    if command -v "$name"; then return 0; fi
  done
  return 1
}

# name of the package, or packages to try in turn; then the programs of which one is enough
need() {
  packages=$1
  shift
  if there "$@"; then return 0; fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests need one of $*, and there is none: install $packages" >&2
    exit 1
  fi
  apt-get update -q
  for package in $packages; do
    if DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$package"; then return 0; fi
  done
  exit 1
}

if [ "${1-}" = browsers ]; then
  need "firefox-esr firefox" firefox
  need webkit2gtk-driver WebKitWebDriver
  need xvfb xvfb-run
  need xauth xauth
  exit
fi

need "chromium-headless-shell chromium" chromium-headless-shell chromium chromium-browser google-chrome
need curl curl

# For machines in namespaces, which are root's alone; without, `ray up` is not walked. With an init the package would
# start a server.
if [ "$(id -u)" = 0 ] && ! [ -d /run/systemd/system ] && command -v apt-get >/dev/null; then
  there sshd && there rsync && there openssl && there ip || RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install \
    -y -q --no-install-recommends openssh-server rsync openssl iproute2 || echo "no sshd: \`ray up\` is not walked here" >&2
fi

# promtool alone, for the tests of the rules, which are left out without it: the whole package would start a server.
if ! there promtool; then
  folder=$(mktemp -d)
  (
    cd "$folder"
    apt-get update -q && apt-get download -q prometheus && dpkg-deb -x prometheus_*.deb . &&
      install usr/bin/promtool /usr/local/bin/
  ) || echo "no promtool: the rules of Prometheus are not tested here" >&2
  rm -rf "$folder"
fi
