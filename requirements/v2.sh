#!/usr/bin/env bash
# usage: requirements/v2.sh VENV_V2 VENV
# Makes VENV_V2 for tests/v2: Python files of the vLLM in v2.lock; all else comes from VENV (make setup-v2).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
base=$2
lock=requirements/v2.lock

fail() {
    echo "setup failed: $1" >&2
    exit 1
}

install() { # what pip arguments...
    local what=$1
    shift
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-cache-dir \
        --no-deps --ignore-installed --no-build-isolation "$@" ||
        fail "could not download or install $what; read pip's message above, and run make setup-v2 again"
}

packages_of='import sysconfig; print(sysconfig.get_path("purelib"))'

echo "[1/3] virtual environment $venv, with the packages of $base behind its own"
rm -rf "$venv"
"$base/bin/python" -m venv --without-pip "$venv" || fail "could not make $venv; run make setup first"
shared=$("$base/bin/python" -c "$packages_of")
own=$("$venv/bin/python" -c "$packages_of")
echo "import site; site.addsitedir('$shared')" >"$own/shared.pth"

echo "[2/3] what vLLM's setup.py imports"
install "build tools" --require-hashes -r <(grep -v '^vllm==' "$lock")

echo "[3/3] $(grep -o '^vllm==[^ ]*' "$lock"), its source distribution without kernels"
# "empty" is vLLM's target without extensions. Its version gets no "+empty", which pip would refuse.
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(sed -n 's/^vllm==\([^ ]*\).*/\1/p' "$lock") \
    install "vLLM" --require-hashes --no-binary vllm -r <(grep '^vllm==' "$lock")

echo "setup done; '$venv/bin/python -m pytest tests/v2' runs the tests"
