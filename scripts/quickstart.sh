#!/usr/bin/env bash
# Set-up and demo on a fresh machine: bash scripts/quickstart.sh [options of `specdec demo`]
# Makes .venv, installs the package, answers a few prompts with plain generate() and with DSpark, prints a table.
set -euo pipefail
source "$(dirname "$0")/common.sh"

make_env .venv "$(newest_transformers)" demo
say "specdec demo${*:+ $*}"
.venv/bin/specdec demo "$@"
