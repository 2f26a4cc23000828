#!/usr/bin/env bash
# Developers' gate before a commit, a few minutes: form, lint, types, fast tests. bash scripts/check.sh [pytest arguments]
# Runs all four even when one fails, then says which did.
set -uo pipefail
source "$(dirname "$0")/common.sh"

make_env .venv "$(newest_transformers)" dev || exit 1
bin=.venv/bin
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false  # as in test.sh
failed=()
step() {
    local name=$1
    shift
    say "$name"
    "$@" || failed+=("$name")
}

step "ruff format" "$bin/ruff" format --check --diff .
step "ruff lint" "$bin/ruff" check .
step "mypy" "$bin/mypy"
step "fast tests" "$bin/python" -m pytest -n "${SPECDEC_TEST_WORKERS:-2}" -m "not slow" -q "$@"
if [ ${#failed[@]} -gt 0 ]; then
    printf '\nfailed: %s\n' "$(IFS=,; echo "${failed[*]}")"
    exit 1
fi
printf '\nall passed\n'
