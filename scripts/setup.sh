#!/usr/bin/env bash
# Creates the virtual environment behind the Makefile; a second call returns at once unless something changed.
#
#   VENV             where the environment goes                         (default: .venv)
#   PYTHON           interpreter to use, 3.11 or newer                  (default: the newest found)
#   TORCH_INDEX_URL  package index that torch and torchvision come from (default: chosen below)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"
STAMP="$VENV/.setup-stamp"
TORCH=2.13.0        # the tested pair; torchvision is compiled against exactly one torch release
TORCHVISION=0.28.0
CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 2; }
is_apt_root() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }

# The folder is part of the stamp because a copied environment keeps pointing at the checkout it came from.
stamp_text() { printf '%s\n' "$PWD"; cat pyproject.toml scripts/setup.sh | sha256sum; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local name tried=""
  if [ -n "${PYTHON:-}" ]; then
    is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is missing or older than 3.11"
    echo "$PYTHON"
    return
  fi
  for name in python3.13 python3.12 python3.11 python3; do
    if is_new_enough "$name"; then echo "$name"; return; fi
    if command -v "$name" >/dev/null; then tried="$tried $name=$("$name" -V 2>&1 | head -n 1)"; fi
  done
  fail "no Python 3.11 or newer (found:${tried:- none}); try: sudo apt-get install python3.11 python3.11-venv," \
    "or point PYTHON at one: make setup PYTHON=/path/to/python3.12"
}

# Debian and Ubuntu ship python3 without venv and ensurepip.
ensure_venv_module() {
  local python="$1" package
  if "$python" -c 'import ensurepip, venv' 2>/dev/null; then return; fi
  package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  if is_apt_root; then
    say "$python lacks the venv module, installing $package"
    apt_install "$package" || true
  fi
  "$python" -c 'import ensurepip, venv' 2>/dev/null \
    || fail "$python cannot create virtual environments; run: sudo apt-get install $package"
}

apt_install() {
  DEBIAN_FRONTEND=noninteractive timeout "${APT_LIMIT:-300}" apt-get -qq -o Acquire::http::Timeout=15 -o Acquire::Retries=1 \
    install -y --no-install-recommends "$@" >/dev/null 2>&1
}

missing_libraries() {
  local cache soname package
  command -v ldconfig >/dev/null || return 0
  cache="$(ldconfig -p)"
  while read -r soname package; do
    case "$cache" in *"$soname"*) ;; *) echo "$package" ;; esac
  done <<'LIBRARIES'
libgomp.so libgomp1
libGL.so libgl1
libEGL.so libegl1
libOSMesa.so libosmesa6
libusb-1.0.so libusb-1.0-0
LIBRARIES
}

# Never fatal: these draw simulator pictures; training and tests of vision-language models run without them.
install_libraries() {
  local missing package
  PATH="$PATH:/usr/sbin:/sbin" # ldconfig is outside an ordinary user's PATH on Debian
  missing="$(missing_libraries | tr '\n' ' ')"
  [ -n "$missing" ] || return 0
  if is_apt_root; then
    say "installing system libraries: $missing"
    timeout 120 apt-get -qq -o Acquire::http::Timeout=15 update >/dev/null 2>&1 || true
    for package in $missing; do apt_install "$package" || true; done
    missing="$(missing_libraries | tr '\n' ' ')"
    [ -n "$missing" ] || return 0
  fi
  say "system libraries missing (only simulator rendering needs them): sudo apt-get install -y $missing"
}

has_browser() {
  local name
  if [ -n "${MMRL_CHROMIUM:-}" ] && command -v "$MMRL_CHROMIUM" >/dev/null; then return; fi
  for name in chromium chromium-browser google-chrome google-chrome-stable chrome microsoft-edge; do
    # Ubuntu's package of this name is a script that asks for snap; it prints no version
    if command -v "$name" >/dev/null && "$name" --version 2>/dev/null | grep -q '[0-9]'; then return; fi
  done
  [ -x "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome" ] \
    || [ -x /Applications/Chromium.app/Contents/MacOS/Chromium ]
}

# Never fatal: only screens that a browser draws need it, and playwright's own download is not used.
install_browser() {
  local packages="chromium fonts-dejavu-core fonts-liberation"
  if has_browser; then return; fi
  if is_apt_root; then
    say "installing Chromium and fonts"
    timeout 120 apt-get -qq -o Acquire::http::Timeout=15 update >/dev/null 2>&1 || true
    # shellcheck disable=SC2086
    APT_LIMIT=600 apt_install $packages || true
    if has_browser; then return; fi
  fi
  say "no Chromium or Chrome (only mmrl.gui needs one): sudo apt-get install -y $packages," \
    "or set MMRL_CHROMIUM to a browser's program"
}

missing_sandbox() {
  command -v bwrap >/dev/null || echo bubblewrap
  case "$(ldconfig -p 2>/dev/null)" in *libseccomp.so.2*) ;; *) echo libseccomp2 ;; esac
}

# Never fatal: only rewards with `sandbox: strict` (code that a model wrote) need it, and they are refused without it.
install_sandbox() {
  local missing package
  [ "$(uname -s)" = Linux ] || return 0
  PATH="$PATH:/usr/sbin:/sbin"
  missing="$(missing_sandbox | tr '\n' ' ')"
  [ -n "$missing" ] || return 0
  if is_apt_root; then
    say "installing the sandbox: $missing"
    timeout 120 apt-get -qq -o Acquire::http::Timeout=15 update >/dev/null 2>&1 || true
    for package in $missing; do apt_install "$package" || true; done
    missing="$(missing_sandbox | tr '\n' ' ')"
    [ -n "$missing" ] || return 0
  fi
  say "no strict sandbox (only code that a model wrote needs it): sudo apt-get install -y $missing"
}

make_environment() {
  local python
  # Only an environment copied from another checkout, or one whose Python is gone or too old, is made anew:
  # an interrupted download need not start over.
  if [ "$(head -n 1 "$STAMP" 2>/dev/null || echo "$PWD")" = "$PWD" ] && is_new_enough "$VENV/bin/python"; then
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null
    return
  fi
  python="$(find_python)"
  ensure_venv_module "$python"
  say "creating $VENV with $("$python" -V)"
  "$python" -m venv --clear "$VENV"
}

pip_install() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }

is_reachable() {
  "$VENV/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=5)' "$1" 2>/dev/null
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# On Linux x86-64 the default index serves CUDA builds of several GB. Without a GPU a CPU build is looked for: in the
# indexes that pip is configured with, then in PyTorch's own.
install_cpu_build() {
  local requirement="$1"
  shift
  if pip_install "$@" "$requirement+cpu" 2>/dev/null; then return; fi
  if is_reachable "$CPU_INDEX" && pip_install "$@" --index-url "$CPU_INDEX" "$requirement"; then return; fi
  pip_install "$@" "$requirement"
}

is_torch_installed() {
  "$VENV/bin/python" -c 'import sys; from importlib.metadata import version as v
sys.exit([v(n).split("+")[0] for n in ("torch", "torchvision")] != sys.argv[1:])' "$TORCH" "$TORCHVISION" 2>/dev/null
}

# --no-deps: torchvision's own requirement would pull the default torch over the one that was just chosen.
install_torch() {
  if is_torch_installed; then return; fi
  say "installing torch $TORCH and torchvision $TORCHVISION"
  if [ -n "${TORCH_INDEX_URL:-}" ]; then
    pip_install --index-url "$TORCH_INDEX_URL" "torch==$TORCH"
    pip_install --index-url "$TORCH_INDEX_URL" --no-deps "torchvision==$TORCHVISION"
  elif has_nvidia_gpu || [ "$(uname -s)" != Linux ]; then
    pip_install "torch==$TORCH"
    pip_install --no-deps "torchvision==$TORCHVISION"
  else
    install_cpu_build "torch==$TORCH"
    install_cpu_build "torchvision==$TORCHVISION" --no-deps
  fi
}

install_suite() {
  local pins="$VENV/constraints.txt"
  "$VENV/bin/python" -m pip freeze --disable-pip-version-check 2>/dev/null | grep -E '^torch(vision)?==' >"$pins"
  say "installing the suite and its tools"
  pip_install --constraint "$pins" --editable '.[dev]'
}

# A build of torchvision for CUDA does not import beside a CPU build of torch, and takes with it whatever imports it.
repair_torchvision() {
  if "$VENV/bin/python" -c 'import torchvision' 2>/dev/null; then return; fi
  cp scripts/torchvision.pth "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/
  "$VENV/bin/python" -c 'import torchvision' || say "torchvision does not work beside this torch; see mmrl doctor"
}

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(stamp_text)" ]; then exit 0; fi
say "first call on this machine or something changed; this takes some minutes"
install_libraries
install_browser
install_sandbox
make_environment
rm -f "$STAMP"
install_torch
install_suite
repair_torchvision
stamp_text >"$STAMP"
say "done: $VENV"
