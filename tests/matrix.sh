#!/usr/bin/env bash
# The CPU tests without a compiler under several versions of torch, a venv each.
#   tests/matrix.sh [VERSION ...]        default: 2.11.0 2.12.0 2.13.0 2.14.0
# CRISP_FLEX_TORCH_INDEX: an index that holds CPU builds of torch; without it torch comes from the
# folder in PIP_FIND_LINKS only, and other versions are skipped: builds for CUDA take gigabytes.
set -uo pipefail
cd "$(dirname "$0")/.."

versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.11.0 2.12.0 2.13.0 2.14.0)
root=${CRISP_FLEX_MATRIX:-${TMPDIR:-/tmp}/crisp-flex-matrix}
source=(--no-index)
[ -n "${CRISP_FLEX_TORCH_INDEX:-}" ] && source=(--index-url "$CRISP_FLEX_TORCH_INDEX")
tests=(tests/passes tests/routing tests/cases/test_faults.py tests/cases/test_systems.py)
failed=0
for version in "${versions[@]}"; do
    venv=$root/$version
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    py=$venv/bin/python
    if ! "$py" -c 'import torch' 2>/dev/null; then
        if ! "$py" -m pip install -q --no-deps "${source[@]}" "torch==$version"; then
            echo "torch $version: skipped, no CPU build to be had"
            continue
        fi
        "$py" -m pip install -q filelock typing-extensions sympy networkx jinja2 fsspec 'numpy<2.4' \
            'transformers>=5.17' pytest hypothesis
    fi
    if PYTHONPATH=. OMP_NUM_THREADS=1 "$py" -m pytest -q -m 'not slow and not long' "${tests[@]}"; then
        echo "torch $version: passed"
    else
        echo "torch $version: FAILED"
        failed=1
    fi
done
exit $failed
