#!/usr/bin/env bash
# Sets commbench up in this checkout and runs it.
#
#   ./run_bench.sh                  measure this machine with sweeps/quick.toml, then name the report
#   ./run_bench.sh test [ARG...]    run the tests; arguments go to pytest
#   ./run_bench.sh gpu-check        check every backend on this machine's GPUs, in at most three minutes
#   ./run_bench.sh ARG...           anything else goes to commbench: ./run_bench.sh sweep --tp 4
#
# The first run makes .venv beside this file and installs into it. Later runs install nothing and need
# no network, until pyproject.toml or the native sources change. A set-up that was interrupted starts
# again from an empty .venv. To set up anew, for instance after adding a GPU: rm -r .venv
#
# An activated environment (venv or conda) that has torch is used instead of .venv. Its torch is left as it is.
#
# Variables:
#   COMMBENCH_PYTHON       the Python that makes .venv (default: python3 if it is 3.11 or newer, else python3.1x)
#   COMMBENCH_TORCH        the torch to install (default: torch==2.13.0, or torch>=2.6 where that has no build)
#   COMMBENCH_TORCH_INDEX  the package index to take torch from. Default without a GPU: PyTorch's index of CPU
#                          builds if it answers within 3 s. With an NVIDIA GPU: pip's own index. With an AMD GPU:
#                          PyTorch's index for the ROCm release found. Empty: always pip's own index.
#
# Exit status: what the tests or commbench exit with; 2 if the set-up fails; 130 if it is interrupted.

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
VENV=$ROOT/.venv
TORCH_PINNED='torch==2.13.0' # the version that commbench is developed with
TORCH_OLDEST='torch>=2.6'    # what pyproject.toml asks for
PYTORCH_INDEX=https://download.pytorch.org/whl
STAMP=.commbench-setup           # in the environment, after a complete set-up: what it was made from
UNFINISHED=.commbench-unfinished # in .venv, while a set-up runs

say() { printf 'run_bench: %s\n' "$*" >&2; }
die() {
  say "error: $*"
  exit 2
}

# ---- which Python ----------------------------------------------------------------------------------------

is_recent() { "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate found=
  if [[ -n ${COMMBENCH_PYTHON:-} ]]; then
    is_recent "$COMMBENCH_PYTHON" || die "COMMBENCH_PYTHON=$COMMBENCH_PYTHON does not run as Python 3.11 or newer"
    found=$COMMBENCH_PYTHON
  else
    for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
      if is_recent "$candidate"; then
        found=$candidate
        break
      fi
    done
  fi
  [[ -n $found ]] || die "commbench needs Python 3.11 or newer, and found $(python3 -V 2>&1 || true);" \
    "install one and name it: COMMBENCH_PYTHON=/path/to/python3.11 ./run_bench.sh"
  "$found" -c 'import venv, ensurepip' 2>/dev/null || die "$found has no venv module;" \
    "install it (on Debian and Ubuntu: apt install python3-venv) or set COMMBENCH_PYTHON to another Python"
  printf '%s\n' "$found"
}

# in_prefix PREFIX CODE: run Python code there, so that no folder of the user's shadows a package.
in_prefix() { (cd -- "$1" && bin/python -c "$2"); }

# The activated environment that has torch, or nothing.
active_environment() {
  local prefix
  for prefix in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    [[ -n $prefix && -x $prefix/bin/python && ! $prefix -ef $VENV ]] || continue
    if in_prefix "$prefix" 'import sys, importlib.util as u; sys.exit(not u.find_spec("torch"))' 2>/dev/null; then
      printf '%s\n' "$prefix"
      return
    fi
  done
}

# ---- what is installed already ---------------------------------------------------------------------------

# A digest of everything that an installation depends on.
setup_key() {
  "$1" -I - "$ROOT" "${COMMBENCH_TORCH:-}" <<'PY'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.blake2b("\0".join([sys.version, sys.prefix, *sys.argv[1:]]).encode(), digest_size=16)
native = (p for p in (root / "commbench" / "native").rglob("*") if p.suffix not in (".so", ".pyc", ".py"))
for path in [root / "pyproject.toml", root / "CMakeLists.txt", root / "constraints-dev.txt", *sorted(native)]:
    if path.is_file():
        digest.update(b"\0" + path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
# an editable installation remembers which names are packages
for path in sorted((root / "commbench").rglob("__init__.py")):
    digest.update(b"\0" + path.relative_to(root).as_posix().encode())
print(digest.hexdigest())
PY
}

# is_set_up PREFIX run|dev: a development set-up (dev) serves for running (run) too.
is_set_up() {
  local key have_key have_kind
  [[ -f $1/$STAMP && ! -e $1/$UNFINISHED ]] || return 1
  key=$(setup_key "$1/bin/python" 2>/dev/null) || return 1
  read -r have_key have_kind <"$1/$STAMP" || return 1
  [[ $have_key == "$key" && ($have_kind == dev || $have_kind == "$2") ]]
}

# ---- installing ------------------------------------------------------------------------------------------

# Quiet unless someone watches; without the user's pip settings that break an installation into an environment.
pip_install() {
  local quiet=0
  [[ -t 2 ]] || quiet=1
  PIP_QUIET=$quiet PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$PYTHON" -m pip install "$@" >&2
}

# answers URL: something answers there within 3 s, name look-up included.
answers() {
  "$PYTHON" -I - "$1" 2>/dev/null <<'PY'
import os, sys, threading, urllib.request

answered = []


def ask():
    with urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=3):
        answered.append(True)


thread = threading.Thread(target=ask, daemon=True)
thread.start()
thread.join(3)
os._exit(0 if answered else 1)
PY
}

gpu_kind() {
  if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    echo cuda
  elif rocm-smi --showid 2>/dev/null | grep -q 'GPU\['; then
    echo rocm
  else
    echo none
  fi
}

# The index to take torch from; an empty line means pip's own.
torch_index() {
  local index release
  if [[ -n ${COMMBENCH_TORCH_INDEX+set} ]]; then
    printf '%s\n' "$COMMBENCH_TORCH_INDEX"
    return
  fi
  case $1 in
    cuda) echo ;;
    rocm)
      release=$(cut -d. -f1,2 "${ROCM_PATH:-/opt/rocm}/.info/version" 2>/dev/null || true)
      index=$PYTORCH_INDEX/rocm$release
      answers "$index/torch/" || die "an AMD GPU is here, but $index does not answer with builds for it;" \
        "set COMMBENCH_TORCH_INDEX to an index of ROCm builds, or to nothing to take what pip gives"
      printf '%s\n' "$index"
      ;;
    none)
      if answers "$PYTORCH_INDEX/cpu/torch/"; then echo "$PYTORCH_INDEX/cpu"; else echo; fi
      ;;
  esac
}

# try_torch REQUIREMENT INDEX: 1 if that index has no such build; any other failure ends the script.
try_torch() {
  local log=$PREFIX/commbench-torch.log
  rm -f "$log"
  say "installing $1 from ${2:-the index that pip uses}"
  if [[ -n $2 ]]; then
    if pip_install --log "$log" --index-url "$2" "$1"; then return 0; fi
  else
    if pip_install --log "$log" "$1"; then return 0; fi
  fi
  if grep -q 'No matching distribution found for torch' "$log" 2>/dev/null && ! grep -q 'Retrying (' "$log"; then
    return 1
  fi
  die "could not install $1; see above and $log, then run this again"
}

install_torch() {
  local gpu index requirement source
  local requirements=("$TORCH_PINNED" "$TORCH_OLDEST")
  gpu=$(gpu_kind)
  index=$(torch_index "$gpu")
  local sources=("$index")
  [[ -z ${COMMBENCH_TORCH:-} ]] || requirements=("$COMMBENCH_TORCH")
  if [[ $gpu == none && -n $index && -z ${COMMBENCH_TORCH_INDEX+set} ]]; then sources=("$index" ""); fi
  for source in "${sources[@]}"; do
    for requirement in "${requirements[@]}"; do
      if try_torch "$requirement" "$source"; then return; fi
    done
  done
  die "no torch build for this Python: $("$PYTHON" -V); tried ${requirements[*]};" \
    "set COMMBENCH_PYTHON to another Python, or COMMBENCH_TORCH and COMMBENCH_TORCH_INDEX to a build that exists"
}

# The requirements of commbench but torch, one a line. run or dev.
requirements() {
  "$PYTHON" -I - "$ROOT/pyproject.toml" "$1" <<'PY'
import re, sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"] + (project["optional-dependencies"]["dev"] if sys.argv[2] == "dev" else [])
print("\n".join(r for r in wanted if not re.match(r"torch\b", r)))
PY
}

# For a step that failed by itself, not by an interruption: what is installed is whole, and the next run goes on from it.
failed() {
  rm -f "$PREFIX/$UNFINISHED"
  die "$*; see above"
}

# Torch first and alone, and commbench itself without its requirements: so pip never resolves torch again.
install_all() {
  local kind=$1 own=$2 list=$PREFIX/commbench-requirements.txt reason
  [[ $own == no ]] || install_torch
  say "installing what commbench needs"
  requirements "$kind" >"$list"
  if [[ $kind == dev && $own == yes ]]; then
    pip_install -r "$list" -c "$ROOT/constraints-dev.txt" || failed "could not install the requirements"
  else
    pip_install -r "$list" || failed "could not install the requirements"
  fi
  rm -f "$list" "$PREFIX/commbench-torch.log"
  say "building and installing commbench"
  pip_install --no-deps -e "$ROOT" || failed "could not install commbench"
  in_prefix "$PREFIX" 'import torch, commbench' || die "commbench is installed but does not import; see above"
  reason=$(in_prefix "$PREFIX" 'from commbench.native import why_unavailable as why; print(why())')
  [[ -z $reason ]] || say "note: $reason, so the shared-memory backends are missing; to have them, install" \
    "a C++17 compiler (on Debian and Ubuntu: apt install g++), remove $PREFIX/$STAMP and run this again"
}

make_venv() {
  local base
  if [[ -e $VENV/$UNFINISHED ]]; then
    say "an earlier set-up did not finish; starting again"
  elif [[ -d $VENV ]] && is_recent "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    touch "$VENV/$UNFINISHED"
    return
  fi
  base=$(find_python)
  rm -rf "$VENV"
  mkdir "$VENV" 2>/dev/null || die "cannot write to $ROOT; clone commbench to a folder of yours"
  touch "$VENV/$UNFINISHED"
  say "making $VENV with $("$base" -V)"
  "$base" -m venv "$VENV" >&2 || die "could not make $VENV; see above"
}

# set_up run|dev: afterwards PREFIX is the environment to use and PYTHON its interpreter.
set_up() {
  local own=no
  PREFIX=$(active_environment)
  if [[ -z $PREFIX ]]; then
    own=yes
    PREFIX=$VENV
  fi
  PYTHON=$PREFIX/bin/python
  if is_set_up "$PREFIX" "$1"; then return; fi

  trap 'say "interrupted; run this again to finish the set-up"; exit 130' INT TERM
  # One set-up at a time, where the system has flock.
  { exec 9>"$ROOT/.run_bench.lock"; } 2>/dev/null || die "cannot write to $ROOT; clone commbench to a folder of yours"
  if command -v flock >/dev/null; then flock 9; fi
  if ! is_set_up "$PREFIX" "$1"; then
    if [[ $own == yes ]]; then
      make_venv
    else
      check_active_environment
    fi
    rm -f "$PREFIX/$STAMP"
    install_all "$1" "$own"
    printf '%s %s\n' "$(setup_key "$PYTHON")" "$1" >"$PREFIX/$STAMP"
    rm -f "$PREFIX/$UNFINISHED"
    say "set-up complete"
  fi
  exec 9>&-
  trap - INT TERM
}

check_active_environment() {
  local version
  is_recent "$PYTHON" || die "the activated environment $PREFIX has $("$PYTHON" -V 2>&1), and commbench needs 3.11" \
    "or newer; deactivate it to let commbench make its own"
  version=$(in_prefix "$PREFIX" 'import torch; print(torch.__version__)') ||
    die "torch in the activated environment $PREFIX does not import; deactivate it to let commbench make its own"
  "$PYTHON" -c 'import re, sys; sys.exit(tuple(map(int, re.findall(r"\d+", sys.argv[1])[:2])) < (2, 6))' "$version" ||
    die "the activated environment $PREFIX has torch $version, and commbench needs 2.6 or newer;" \
      "deactivate it to let commbench make its own"
  say "using torch $version of the activated environment $PREFIX"
}

# ---- what to run -----------------------------------------------------------------------------------------

case ${1-} in
  test)
    shift
    set_up dev
    cd -- "$ROOT"
    exec "$PYTHON" -m pytest "$@"
    ;;
  gpu-check)
    shift
    set_up run
    exec "$PYTHON" -P -m commbench.harness.environment.gpu_check "$@"
    ;;
  '')
    set_up run
    [[ $PWD -ef $ROOT ]] || say "paths below start at $ROOT"
    cd -- "$ROOT"
    exec "$PYTHON" -P -m commbench sweep sweeps/quick.toml
    ;;
  *)
    set_up run
    exec "$PYTHON" -P -m commbench "$@"
    ;;
esac
