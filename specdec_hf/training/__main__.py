"""``python -m specdec_hf.training RECIPE.yaml OUTPUT``: carry out a recipe of ``configs/``."""

from __future__ import annotations

import argparse
import sys

from .recipe import run


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> int:
    """Parse, run, print the figures."""
    parser = argparse.ArgumentParser(prog="python -m specdec_hf.training", description="Carry out a recipe.")
    parser.add_argument("recipe", help="YAML file, e.g. configs/smollm2-135m.yaml")
    parser.add_argument("output", help="directory for texts, checkpoints and the head")
    arguments = parser.parse_args()
    try:
        figures = run(arguments.recipe, arguments.output, _say)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    for name, value in figures.items():
        sys.stdout.write(f"{name}: {value}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
