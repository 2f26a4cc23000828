"""`specdec compare`: several ways to draft, plain decoding and transformers' own, on the same prompts in one run.

Calls the public `generate()` only, greedily, batch 1. Every prompt is answered by every way in turn, in an order that
moves on by one each time; speed is compared within a prompt. Figures end where the plain text begins to repeat itself
(`repetition`).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from . import drafters
from .generation import enable_speculation, last_speculation
from .hardware import processor_name
from .loading import load_target
from .options import did_you_mean
from .packing import pack_linears
from .prompts import encode, read_conversations
from .provenance import provenance
from .repetition import RULE, repeats_from

PLAIN = "plain"
#: transformers' own ways: assisted generation with a small model, and prompt lookup.
OWN = ("transformers_assisted", "transformers_lookup")
_LOOKUP_TOKENS = 10  # what transformers' documentation uses


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Args:
        name: `"plain"`, a strategy's name, or one of `OWN`.
        knobs: arguments of `generate()`.
        label: for the table.
    """

    name: str
    knobs: dict[str, Any]
    label: str


@dataclass
class Result:
    """What one way did, over all prompts.

    Attributes:
        label: the way.
        tokens, seconds: counted new tokens and their time, the prompt's included, per prompt.
        forwards: of the target after the prompt's, per prompt.
        parts: seconds in draft, target and other, summed; empty where they are not known.
        same: per prompt, whether the text equals plain decoding's.
    """

    label: str
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    same: list[bool] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        """Tokens per target forward, the prompt's forward and its token left out."""
        return sum(count - 1 for count in self.tokens) / max(sum(self.forwards), 1)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / sum(self.seconds)

    def ratio(self, plain: Result) -> float:
        """Median over prompts of this way's speed by plain decoding's."""
        own, base = ([n / s for n, s in zip(r.tokens, r.seconds, strict=True)] for r in (self, plain))
        return statistics.median(a / b for a, b in zip(own, base, strict=True))


class _Clock:
    """A streamer that notes when each token arrives and how many forwards the target had made."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.forwards = -1  # the prompt's own does not count
        self.arrivals: list[tuple[float, int]] = []
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self.arrivals += [(time.perf_counter() - self.begin, self.forwards)] * value.numel()
        self._is_prompt = False

    def end(self) -> None:
        pass


def make_ways(names: Sequence[str], dtype: torch.dtype, device: Any) -> list[Way]:
    """Load what each way needs.

    Args:
        names: `NAME` or `NAME=PATH`: a strategy, with its head or draft model, or one of `OWN`. Plain decoding is
            always there, as the first.
        dtype, device: of the heads.

    Raises:
        ValueError: no such way; the message lists what there is.
    """
    known = (*drafters.available(), *OWN)
    ways = [Way(PLAIN, {}, PLAIN)]
    for entry in names:
        name, _, path = entry.partition("=")
        if name not in known:
            raise ValueError(f"{name!r} is no way to draft{did_you_mean(name, known)}. There are: {', '.join(known)}.")
        assistant = {"assistant_model": _load(path, dtype, device)} if path else {}
        if name == "transformers_lookup":
            knobs: dict[str, Any] = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
        else:
            knobs = assistant | ({} if name in OWN else {"speculative": name})
        ways.append(Way(name, knobs, entry))
    return ways


def _load(path: str, dtype: torch.dtype, device: Any) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from .heads import dspark  # registers its configuration

    if path == "bundled":
        from .default_target import BUNDLED_HEAD

        model = dspark.DSparkDraftModel.from_pretrained(BUNDLED_HEAD, dtype=dtype)
    else:
        is_head = hasattr(AutoConfig.from_pretrained(path), "speculative_strategy")
        model = (AutoModel if is_head else AutoModelForCausalLM).from_pretrained(path, dtype=dtype)
    model = model.to(device).eval()
    pack_linears(model)
    return model


@contextmanager
def _counted(model: Any, clock: _Clock) -> Iterator[None]:
    def count(*_: Any) -> None:
        clock.forwards += 1

    handle = model.register_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


def compare(
    model: Any, ways: Sequence[Way], prompts: Sequence[torch.Tensor], max_new_tokens: int = 128
) -> list[Result]:
    """Answer every prompt in every way.

    Args:
        model: the target.
        ways: of `make_ways`; the first is plain decoding.
        prompts: token ids [1, L].
        max_new_tokens: budget of one answer.

    Returns:
        A result for each way, in order.
    """
    enable_speculation(model)
    results = [Result(way.label) for way in ways]
    for way in ways:  # packs layers, fills caches: not counted
        _answer(model, way, prompts[0], 8)
    for number, ids in enumerate(tqdm(prompts, desc="prompts", leave=False)):
        order = [(number + place) % len(ways) for place in range(len(ways))]
        answers = {index: _answer(model, ways[index], ids, max_new_tokens) for index in order}
        plain = answers[0][0]
        keep = repeats_from(plain)
        for index, (tokens, clock, parts) in answers.items():
            result, same = results[index], tokens == plain
            # an answer that parts from plain decoding's is cut by its own text
            count = keep if same else repeats_from(tokens)
            seconds, forwards = clock.arrivals[count - 1]
            result.tokens.append(count)
            result.seconds.append(seconds)
            result.forwards.append(forwards)
            result.same.append(same)
            for part, value in parts.items():
                result.parts[part] = result.parts.get(part, 0.0) + value
    return results


def _answer(model: Any, way: Way, ids: torch.Tensor, budget: int) -> tuple[list[int], _Clock, dict[str, float]]:
    clock = _Clock()
    with _counted(model, clock):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=budget,
            streamer=clock,
            **way.knobs,
        )
    stats = last_speculation(model) if "speculative" in way.knobs else None
    parts = {} if stats is None else {part: stats.seconds[part] for part in ("draft", "target", "other")}
    return out[0, ids.shape[1] :].tolist(), clock, parts


def table(results: Sequence[Result]) -> str:
    """The results as text, one line a way."""
    width = max(len(result.label) for result in results)
    lines = [
        f"{'':{width}} {'tau':>5} {'tokens/s':>9} {'speed-up':>9} {'draft':>6} {'target':>7} {'other':>6} {'same':>7}"
    ]
    for result in results:
        total = sum(result.parts.values())
        shares = [f"{result.parts[part] / total:.0%}" if total else "" for part in ("draft", "target", "other")]
        lines.append(
            f"{result.label:{width}} {result.accepted_length:>5.2f} {result.speed:>9.1f} "
            f"{result.ratio(results[0]):>8.2f}x {shares[0]:>6} {shares[1]:>7} {shares[2]:>6} "
            f"{sum(result.same):>3}/{len(result.same)}"
        )
    return "\n".join(lines)


def run_comparison(
    data: Sequence[Path],
    names: Sequence[str],
    target: str | None,
    dtype: str,
    limit: int,
    max_new_tokens: int,
    threads: int | None,
    output: Path | None,
) -> str:
    """Load, compare, write: all of `specdec compare`.

    Args:
        data: JSONL prompts; the first user turn of each conversation is answered.
        names: see `make_ways`. `=bundled` names the head that comes with the package.
        target: name or directory; None = SmolLM2-135M-Instruct.
        dtype: see `loading.load_target`.
        limit: prompts of each file.
        max_new_tokens: budget of one answer.
        threads: CPU threads; None leaves torch's.
        output: JSON file to write, or None.

    Returns:
        The table, with what was measured above it.
    """
    if threads:
        torch.set_num_threads(threads)
    conversations = [conversation for path in data for conversation in read_conversations(path, limit)]
    loaded = load_target(target, dtype)
    model = loaded.model
    ways = make_ways(names, model.dtype, model.device)
    prompts = [encode(loaded.tokenizer, c.turns[0].messages).to(model.device) for c in conversations]
    results = compare(model, ways, prompts, max_new_tokens)
    used = torch.get_num_threads()
    if output is not None:
        rows = [
            {**vars(r), "accepted_length": r.accepted_length, "speed": r.speed, "ratio": r.ratio(results[0])}
            for r in results
        ]
        settings = {"dtype": loaded.dtype, "threads": used, "limit": limit, "max_new_tokens": max_new_tokens}
        written = {"provenance": provenance(**settings), "ways": rows}
        output.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    head = (
        f"{loaded.name}, {loaded.dtype}, {used} threads, {processor_name()}, torch {torch.__version__}; "
        f"{len(prompts)} prompts, greedy, at most {max_new_tokens} new tokens. Speed-up: median over prompts. {RULE}"
    )
    return f"{head}\n\n{table(results)}"
