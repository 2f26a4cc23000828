"""What a round costs: `specdec bench`. Calls the public `generate()` only, as a user would.

Plain decoding and speculation take turns in one run, and ratios are medians over pairs, since timings drift. A step of
plain decoding is the time between two tokens of a streamer; a round is the recorded time of draft, target and the rest.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .generation import enable_speculation, last_speculation
from .hardware import processor_name
from .loading import load_pair
from .provenance import provenance


@dataclass(frozen=True)
class RoundCost:
    """Cost at one context length, medians over repeats, in milliseconds.

    Args:
        context: tokens of the prompt.
        plain_step: one token of plain decoding.
        draft, target, other: parts of one speculative round.
        accepted_length: tokens a round gained (bonus counted); random prompts, so no measure of quality.
    """

    context: int
    plain_step: float
    draft: float
    target: float
    other: float
    accepted_length: float

    @property
    def round(self) -> float:
        """One whole round in milliseconds."""
        return self.draft + self.target + self.other

    @property
    def other_share(self) -> float:
        """Share of a round spent outside the forwards of draft and target."""
        return self.other / self.round


class _Clock:
    """A streamer that notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        self.times.append(time.perf_counter())

    def step(self) -> float:
        """Median seconds between tokens; the prompt (two entries) and the end are left out."""
        return statistics.median(b - a for a, b in zip(self.times[1:-2], self.times[2:-1], strict=True))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    target: Any, head: Any, contexts: list[int], new_tokens: int = 48, repeats: int = 5, threads: int | None = None
) -> list[RoundCost]:
    """Time plain decoding and speculation in turns at several context lengths.

    Args:
        target: a loaded causal LM.
        head: its draft head.
        contexts: prompt lengths in tokens; random ids, fixed seed.
        new_tokens: tokens per call, at least 8.
        repeats: pairs of calls, after one that is not counted.
        threads: CPU threads; None leaves torch's.

    Raises:
        ValueError: `new_tokens` below 8 (a median needs steps).
    """
    if new_tokens < 8:
        raise ValueError(f"new_tokens={new_tokens}: a median of step times needs at least 8; pass more.")
    enable_speculation(target)
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    results = []
    with _threads(threads):
        for context in contexts:
            ids = torch.randint(vocabulary, (1, context), generator=generator).to(target.device)
            rows = []
            for repeat in tqdm(range(repeats + 1), desc=f"{context} tokens of context"):
                clock = _Clock()
                target.generate(ids, streamer=clock, **settings)
                target.generate(ids, assistant_model=head, **settings)
                stats = last_speculation(target)
                assert stats is not None
                if repeat:
                    parts = [stats.seconds[part] / stats.rounds for part in ("draft", "target", "other")]
                    rows.append((clock.step(), *parts, stats.mean_accepted_length / 1e3))
            results.append(RoundCost(context, *(statistics.median(column) * 1e3 for column in zip(*rows, strict=True))))
    return results


def run_benchmark(
    target: str | None,
    draft: str | None,
    dtype: str,
    contexts: list[int],
    new_tokens: int,
    repeats: int,
    threads: int | None,
    output: Path | None,
) -> list[RoundCost]:
    """Load target and head, measure, print the table, write the JSON: all of `specdec bench`.

    Args:
        target, draft: names or directories; None for the defaults of `specdec demo`.
        dtype: `"bfloat16"`, `"float32"`, `"float16"`, or `"auto"` (see `hardware.fast_dtype`).
        contexts, new_tokens, repeats, threads: see `measure`.
        output: JSON file to write, or None.
    """
    pair = load_pair(target, draft, dtype)
    results = measure(pair.model, pair.head, contexts, new_tokens, repeats, threads)
    used = threads or torch.get_num_threads()
    print(f"{pair.target}, {pair.model.num_parameters() / 1e6:.0f} M parameters, {pair.dtype}, {used} threads")
    print(f"{processor_name()}, torch {torch.__version__}; medians of {repeats} pairs, milliseconds")
    print(table(results))
    if output is not None:
        write_json(results, output, dtype=pair.dtype, threads=used, repeats=repeats)
    return results


def table(results: list[RoundCost]) -> str:
    """The results as text: milliseconds, shares, and the growth of a round and of a plain step with the context."""
    head = f"{'context':>8} {'plain step':>11} {'round':>8} {'draft':>8} {'target':>8} {'other':>7} {'other share':>12}"
    lines = [head]
    for cost in results:
        lines.append(
            f"{cost.context:>8} {cost.plain_step:>8.1f} ms {cost.round:>8.1f} {cost.draft:>8.1f} {cost.target:>8.1f} "
            f"{cost.other:>7.2f} {cost.other_share:>11.1%}"
        )
    if len(results) > 1:
        first, last = results[0], results[-1]
        lines.append(
            f"from {first.context} to {last.context} tokens: a round costs {last.round / first.round:.2f} times as "
            f"much, a plain step {last.plain_step / first.plain_step:.2f} times"
        )
    return "\n".join(lines)


def write_json(results: list[RoundCost], path: Path, **settings: Any) -> None:
    """Write the results with their provenance (see `provenance`)."""
    rows = [{**asdict(cost), "round": cost.round, "other_share": cost.other_share} for cost in results]
    result = {"provenance": provenance(**settings), "rounds": rows}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
