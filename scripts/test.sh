#!/usr/bin/env bash
# Set-up and tests on a fresh machine: bash scripts/test.sh [arguments of pytest]
# Without arguments: the whole suite on the newest transformers, contract and golden tests on the oldest one supported.
# With arguments: pytest with these arguments on both. Ends with pytest's own summary; fails if either fails.
set -uo pipefail
source "$(dirname "$0")/common.sh"
oldest=5.19.0

make_env .venv "$(newest_transformers)" dev || exit 1
make_env .venv-5.19 "$oldest" dev || exit 1

# One thread a worker, two workers: the models of the tests are so small that a second thread only costs, and results
# do not depend on how many cores the machine has.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
workers=${SPECDEC_TEST_WORKERS:-2}

run() { # run FOLDER ARGUMENTS...
    local folder=$1
    shift
    "$folder/bin/python" -m pytest -n "$workers" --dist worksteal -o "cache_dir=.pytest_cache${folder#.venv}" "$@"
}

if [ $# -gt 0 ]; then
    old=("$@")
else
    # Golden tests are those that read tests/golden.
    mapfile -t old < <(echo tests/contract; grep -l '"golden"' tests/test_*.py)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT

say "1/2: transformers $oldest: pytest ${old[*]}"
run .venv-5.19 "${old[@]}" 2>&1 | tee "$log"
old_rc=${PIPESTATUS[0]}
say "2/2: transformers $(newest_transformers): pytest ${*:-(whole suite)}"
run .venv "$@"
new_rc=$?
# The last thing printed tells the truth: when only the first run failed, its ending is shown again.
if [ "$old_rc" -ne 0 ] && [ "$new_rc" -eq 0 ]; then
    say "the suite passed on transformers $(newest_transformers) and FAILED on $oldest; that run ended with"
    tail -n 30 "$log"
fi
[ "$old_rc" -eq 0 ] && [ "$new_rc" -eq 0 ]
