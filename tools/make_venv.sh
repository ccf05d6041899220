#!/usr/bin/env bash
# Create a virtual environment at $1 with the first usable Python 3.11 to 3.13; keep one that works.
set -euo pipefail

venv=$1
check='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'

if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "$check" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

for python in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
    command -v "$python" >/dev/null 2>&1 || continue
    "$python" -c "$check" 2>/dev/null || continue
    # Debian ships venv without ensurepip unless python3-venv is installed.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || continue
    echo "creating $venv with $("$python" --version)"
    exec "$python" -m venv --clear "$venv"
done

echo "no usable Python found: need 3.11, 3.12 or 3.13 with the venv module (Debian and Ubuntu: python3-venv)." >&2
echo "Name one with: make PYTHON=/path/to/python3.12" >&2
exit 1
