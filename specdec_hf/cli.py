"""``specdec``: the command. Parses, calls one function of the package, turns what a user got wrong into one line.

No logic of its own. Each command imports what it needs when it runs, so ``specdec --help`` answers at once.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated

import typer

from . import __version__

app = typer.Typer(
    help="Speculative decoding for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback of a fault in the package should be Python's own, whole
)


class DType(str, enum.Enum):
    """Number types that a command offers."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specdec_hf {__version__}")
        raise typer.Exit


@app.callback()
def specdec(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face transformers: the same output from generate(), in fewer target forwards."""


@app.command()
def demo(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt of your own; may be given several times.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Model on the Hub or directory. Default: SmolLM2-135M-Instruct.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="DSpark head for it. Default: the one that comes with the package.")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Number type of both models.")] = DType.bfloat16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens for each prompt.")] = 128,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")] = None,
) -> None:
    """Answer a few prompts with plain generate() and with DSpark; show texts, accepted length, speed."""
    from .demo import PROMPTS, run_demo

    run_demo(prompt or PROMPTS, target, draft, dtype.value, max_new_tokens, threads)


@app.command()
def bench(
    target: Annotated[
        str | None, typer.Option(help="Model on the Hub or directory. Default: SmolLM2-135M-Instruct.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="DSpark head for it. Default: the one that comes with the package.")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Number type of both models.")] = DType.bfloat16,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Prompt lengths. Default: 128 and 4000.")] = None,
    new_tokens: Annotated[int, typer.Option(min=8, help="New tokens per call.")] = 48,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of calls per context.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the figures with their provenance to this JSON file.")] = None,
) -> None:
    """Measure what a round costs beside a step of plain decoding, and what a long context adds."""
    from .benchmark import run_benchmark

    run_benchmark(target, draft, dtype.value, context or [128, 4000], new_tokens, repeats, threads, output)


def main() -> None:
    """Entry point of the ``specdec`` command. What a user got wrong ends in one line and exit status 2."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("SPECDEC_TRACEBACK"):
            raise
        typer.echo(f"specdec: {error}\n(SPECDEC_TRACEBACK=1 shows where)", err=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
