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
from .interop.commands import add_commands as add_file_commands
from .training.commands import add_commands as add_training_commands

app = typer.Typer(
    help="Speculative decoding for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback of a fault in the package should be Python's own, whole
)


class DType(str, enum.Enum):
    """Number types that a command offers; auto is bfloat16 where the processor computes in it, else float32."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


_Target = Annotated[str | None, typer.Option(help="Model on the Hub or directory. Default: SmolLM2-135M-Instruct.")]
_Draft = Annotated[str | None, typer.Option(help="DSpark head for it. Default: the one that comes with the package.")]
_DType = Annotated[DType, typer.Option(help="Number type of all models.")]
_Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")]
_Temperatures = Annotated[list[float] | None, typer.Option(min=0, help="0 is greedy. Default: 0 and 1.")]
_NewTokens = Annotated[int, typer.Option(min=2, help="Most new tokens of an answer.")]
_Seed = Annotated[int, typer.Option(help="Seed of the sampling.")]
_Settings = Annotated[
    str | None,
    typer.Option(help="How to draft: fields of SpeculativeConfig, as draft_tree_nodes=12,schedule=throughput."),
]
_File = Annotated[Path | None, typer.Option(help="Write the figures with their provenance to this JSON file.")]


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
    target: _Target = None,
    draft: _Draft = None,
    dtype: _DType = DType.auto,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens for each prompt.")] = 128,
    threads: _Threads = None,
    settings: _Settings = None,
) -> None:
    """Answer a few prompts with plain generate() and with DSpark; show texts, accepted length, speed."""
    from .demo import PROMPTS, run_demo

    run_demo(prompt or PROMPTS, target, draft, dtype.value, max_new_tokens, threads, settings)


@app.command()
def bench(
    target: _Target = None,
    draft: _Draft = None,
    dtype: _DType = DType.auto,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Prompt lengths. Default: 128 and 4000.")] = None,
    new_tokens: Annotated[int, typer.Option(min=8, help="New tokens per call.")] = 48,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of calls per context.")] = 5,
    threads: _Threads = None,
    output: _File = None,
) -> None:
    """Measure what a round costs beside a step of plain decoding, and what a long context adds."""
    from .benchmark import run_benchmark

    run_benchmark(target, draft, dtype.value, context or [128, 4000], new_tokens, repeats, threads, output)


@app.command()
def compare(
    ways: Annotated[
        list[str],
        typer.Argument(
            help="NAME or NAME=HEAD: a strategy with its head or draft model (dspark=bundled, prompt_lookup, "
            "draft_model=DIR, ...), with settings behind a colon (dspark=bundled:schedule=throughput); or "
            "transformers' own: transformers_assisted=DIR, transformers_lookup."
        ),
    ],
    data: Annotated[list[Path] | None, typer.Option(help="JSONL prompts; several allowed.")] = None,
    target: _Target = None,
    dtype: _DType = DType.auto,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered at a time.")] = 1,
    random: Annotated[int, typer.Option(min=0, help="So many prompts of random tokens.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 5,
    max_new_tokens: _NewTokens = 128,
    threads: _Threads = None,
    output: _File = None,
) -> None:
    """Compare ways to draft with each other, with plain decoding and with transformers' own, in one run."""
    from .comparison import run_comparison

    typer.echo(
        run_comparison(data or [], ways, target, dtype.value, limit, max_new_tokens, threads, output, batch, random)
    )


@app.command("eval")
def evaluate(
    data: Annotated[
        list[Path], typer.Option(help='JSONL with {"turns": [...]} or {"messages": [...]}; several allowed.')
    ],
    target: _Target = None,
    draft: _Draft = None,
    dtype: _DType = DType.auto,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each file.")] = 40,
    max_new_tokens: _NewTokens = 256,
    temperature: _Temperatures = None,
    threshold: Annotated[
        list[float] | None, typer.Option(min=0, max=1, help="Confidence thresholds of the sweep. Default: 0 to 0.8.")
    ] = None,
    sweep_prompts: Annotated[int, typer.Option(min=0, help="Prompts of each file in the sweep; 0 = no sweep.")] = 4,
    all_turns: Annotated[bool, typer.Option("--all-turns", help="Answer every turn, not only the first.")] = False,
    seed: _Seed = 0,
    settings: _Settings = None,
    threads: _Threads = None,
    output: Annotated[Path | None, typer.Option(help="Directory for eval.json and report.html.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Time a few steps and say how long it would take.")
    ] = False,
) -> None:
    """Measure accepted length, acceptance, speed and equality with plain generate() on your prompts."""
    from .evaluation import THRESHOLDS, Settings, estimate_text, run_evaluation
    from .options import parse_settings
    from .report import table

    what = Settings(
        limit,
        max_new_tokens,
        tuple(temperature or (0.0, 1.0)),
        tuple(threshold or THRESHOLDS) if sweep_prompts else (),
        max(sweep_prompts, 1),
        all_turns,
        seed,
        parse_settings("dspark", settings or ""),
    )
    result = run_evaluation(data, target, draft, dtype.value, what, threads, output, dry_run)
    typer.echo(estimate_text(result) if dry_run else table(result))
    if output is not None and not dry_run:
        typer.echo(f"written: {output / 'eval.json'}, {output / 'report.html'}")


@app.command()
def calibrate(
    data: Annotated[list[Path], typer.Option(help="JSONL prompts that the head was not trained on; several allowed.")],
    target: _Target = None,
    draft: _Draft = None,
    dtype: _DType = DType.auto,
    limit: Annotated[int | None, typer.Option(min=2, help="Prompts of each file.")] = 40,
    max_new_tokens: _NewTokens = 256,
    temperature: _Temperatures = None,
    seed: _Seed = 0,
    threads: _Threads = None,
    output: Annotated[Path | None, typer.Option(help="Directory for calibration.json and reliability.png.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Directory for the calibrated head; its own one changes its config.json alone.")
    ] = None,
) -> None:
    """Fit the temperatures of a head's confidence, so that a threshold of 0.5 means one in two."""
    from .calibration import Settings, run_calibration, table

    settings = Settings(limit, max_new_tokens, tuple(temperature or (0.0, 1.0)), seed)
    typer.echo(table(run_calibration(data, target, draft, dtype.value, settings, threads, output, save)))
    if save is not None:
        typer.echo(f"written: {save}")


add_file_commands(app)
add_training_commands(app)


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
