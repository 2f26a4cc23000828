"""`specdec compare`: several ways to draft, plain decoding and transformers' own, on the same prompts in one run.

Calls the public `generate()` only, greedily. Every prompt (or batch of them) is answered by every way in turn, in an
order that moves on by one each time; speed is compared within a prompt. Of single prompts, figures end where the plain
text begins to repeat itself (`repetition`); a batch is timed to its end, since a streamer would make its rows advance
level.
"""

from __future__ import annotations

import json
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from . import drafters
from .generation import enable_speculation, last_speculation
from .hardware import processor_name
from .loading import load_target
from .options import did_you_mean, parse_settings
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
        tokens, seconds: counted new tokens and their time, the prompt's included, per prompt (or batch).
        forwards: of the target after the prompt's, per prompt; of a batch, each counted once for each row in it.
        rows: prompts of each batch; empty = one each.
        paused: rounds of the batch that were plain because drafting did not pay.
        parts: seconds in draft, target and other, summed; empty where they are not known.
        same: per prompt, whether the text equals plain decoding's.
    """

    label: str
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    same: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    paused: int = 0

    @property
    def accepted_length(self) -> float:
        """Tokens per row and target forward, the prompt's forward and its token left out."""
        firsts = sum(self.rows) if self.rows else len(self.tokens)
        return (sum(self.tokens) - firsts) / max(sum(self.forwards), 1)

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
        names: `NAME`, `NAME=PATH` or either followed by `:KNOB=VALUE,...`: a strategy, with its head or draft model and
            fields of `SpeculativeConfig` (`schedule` and `threshold` are short for the longest two), or one of `OWN`.
            Plain decoding is always there, as the first.
        dtype, device: of the heads.

    Raises:
        ValueError: no such way; the message lists what there is.
    """
    known = (*drafters.available(), *OWN)
    ways = [Way(PLAIN, {}, PLAIN)]
    for entry in names:
        what, _, settings = entry.partition(":")
        name, _, path = what.partition("=")
        if name not in known:
            raise ValueError(f"{name!r} is no way to draft{did_you_mean(name, known)}. There are: {', '.join(known)}.")
        assistant = {"assistant_model": _load(path, dtype, device)} if path else {}
        if name == "transformers_lookup":
            knobs: dict[str, Any] = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
        else:
            knobs = assistant | ({} if name in OWN else {"speculative": parse_settings(name, settings)})
        if settings and name in OWN:
            raise ValueError(f"{entry!r}: {name} is transformers' own and takes no settings here; leave them out.")
        ways.append(Way(name, knobs, entry))
    return ways


def batches(prompts: Sequence[torch.Tensor], size: int, pad: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts [1, L] in batches: ids and attention masks [B, L], padded at the left; the last may be smaller."""
    result = []
    for start in range(0, len(prompts), size):
        own = [ids[0] for ids in prompts[start : start + size]]
        longest = max(map(len, own))
        fill = [longest - len(ids) for ids in own]
        tokens = torch.stack(
            [torch.nn.functional.pad(ids, (n, 0), value=pad) for ids, n in zip(own, fill, strict=True)]
        )
        places = torch.arange(longest, device=tokens.device)
        result.append((tokens, (places >= torch.tensor(fill, device=tokens.device)[:, None]).long()))
    return result


def random_prompts(vocabulary: int, count: int, length: int = 48) -> list[torch.Tensor]:
    """Prompts [1, `length`] of random tokens, fixed seed: text that no draft can foresee."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (1, length), generator=generator) for _ in range(count)]


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
    model: Any,
    ways: Sequence[Way],
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int = 128,
    batch: int = 1,
    **settings: Any,
) -> list[Result]:
    """Answer every prompt in every way.

    Args:
        model: the target.
        ways: of `make_ways`; the first is plain decoding.
        prompts: token ids [1, L].
        max_new_tokens: budget of one answer.
        batch: prompts answered at a time.
        settings: further arguments of every call of `generate()`, e.g. `do_sample=True`.

    Returns:
        A result for each way, in order.
    """
    enable_speculation(model)
    if batch > 1 and (own := [way.label for way in ways if way.name in OWN]):
        raise ValueError(
            f"batch={batch} with {own[0]}: transformers' own ways take one prompt at a time; leave it out."
        )
    results = [Result(way.label) for way in ways]
    settings = {"do_sample": False, **settings}
    groups = batches(prompts, batch)
    for way in ways:  # packs layers, fills caches, measures costs: not counted
        _answer(model, way, groups[0], 8, batch == 1, settings)
    for number, group in enumerate(tqdm(groups, desc="prompts", leave=False)):
        order = [(number + place) % len(ways) for place in range(len(ways))]
        answers = {index: _answer(model, ways[index], group, max_new_tokens, batch == 1, settings) for index in order}
        for index, result in enumerate(results):
            stats = answers[index][3]
            result.paused += 0 if stats is None else stats.paused_rounds
        plain = answers[0][0]
        if batch > 1:
            _add_batch(results, answers, len(group[0]))
            continue
        keep = repeats_from(plain)
        for index, (tokens, clock, parts, stats) in answers.items():
            result, same = results[index], tokens == plain
            # an answer that parts from plain decoding's is cut by its own text
            count = keep if same else repeats_from(tokens)
            seconds, forwards = clock.arrivals[count - 1]
            if stats is not None:  # drafting may use the target too
                forwards = _rounds_until(count, stats.accepted_lengths[0])
            result.tokens.append(count)
            result.seconds.append(seconds)
            result.forwards.append(forwards)
            result.same.append(same)
            for part, value in parts.items():
                result.parts[part] = result.parts.get(part, 0.0) + value
    return results


def _rounds_until(tokens: int, gained: Sequence[int]) -> int:
    """Rounds until so many tokens were there, the first of which comes from the prompt's forward."""
    return bisect_left(list(accumulate(gained, initial=1)), tokens)


def _add_batch(results: list[Result], answers: dict[int, Any], rows: int) -> None:
    """Book one batch: all its tokens, to the end of each row."""
    for index, (tokens, clock, parts, stats) in answers.items():
        result, count = results[index], sum(map(len, tokens))
        result.tokens.append(count)
        result.rows.append(rows)
        result.seconds.append(clock.arrivals[-1][0])
        result.forwards.append(count - rows if stats is None else stats.rounds)
        result.same.append(tokens == answers[0][0])
        for part, value in parts.items():
            result.parts[part] = result.parts.get(part, 0.0) + value


def _answer(
    model: Any, way: Way, group: tuple[torch.Tensor, torch.Tensor], budget: int, one: bool, settings: dict[str, Any]
) -> tuple[Any, _Clock, dict[str, float], Any]:
    ids, mask = group
    clock = _Clock()
    with _counted(model, clock):
        streamer = {"streamer": clock} if one else {}
        out = model.generate(ids, attention_mask=mask, max_new_tokens=budget, **streamer, **settings, **way.knobs)
        clock.arrivals.append((time.perf_counter() - clock.begin, clock.forwards))
    stats = last_speculation(model) if "speculative" in way.knobs else None
    parts = {} if stats is None else {part: stats.seconds[part] for part in ("draft", "target", "other")}
    texts = [_to_end(row, model.generation_config.eos_token_id) for row in out[:, ids.shape[1] :].tolist()]
    return texts[0] if one else texts, clock, parts, stats


def _to_end(tokens: list[int], eos: Any) -> list[int]:
    """A row without its padding: up to and including the first end-of-sequence token."""
    ends = set(eos if isinstance(eos, list) else [eos])
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


def table(results: Sequence[Result]) -> str:
    """The results as text, one line a way."""
    width = max(len(result.label) for result in results)
    lines = [
        f"{'':{width}} {'tau':>5} {'tokens/s':>9} {'speed-up':>9} {'draft':>6} {'target':>7} {'other':>6} {'same':>7}"
    ]
    for result in results:
        total = sum(result.parts.values())
        paused = f"  {result.paused} plain rounds" if result.paused else ""
        shares = [f"{result.parts[part] / total:.0%}" if total else "" for part in ("draft", "target", "other")]
        lines.append(
            f"{result.label:{width}} {result.accepted_length:>5.2f} {result.speed:>9.1f} "
            f"{result.ratio(results[0]):>8.2f}x {shares[0]:>6} {shares[1]:>7} {shares[2]:>6} "
            f"{sum(result.same):>3}/{len(result.same)}{paused}"
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
    batch: int = 1,
    random: int = 0,
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
        batch: prompts answered at a time.
        random: so many prompts of random tokens, beside those of `data`.

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
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompts += [ids.to(model.device) for ids in random_prompts(vocabulary, random)]
    if not prompts:
        raise ValueError("no prompts: name a file with --data, or a number of prompts of random tokens with --random.")
    results = compare(model, ways, prompts, max_new_tokens, batch)
    used = torch.get_num_threads()
    if output is not None:
        rows = [
            {**vars(r), "accepted_length": r.accepted_length, "speed": r.speed, "ratio": r.ratio(results[0])}
            for r in results
        ]
        settings = {"dtype": loaded.dtype, "threads": used, "limit": limit, "max_new_tokens": max_new_tokens,
                    "batch": batch, "random": random}  # fmt: skip
        written = {"provenance": provenance(**settings), "ways": rows}
        output.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    head = (
        f"{loaded.name}, {loaded.dtype}, {used} threads, {processor_name()}, torch {torch.__version__}; "
        f"{len(prompts)} prompts{f' in batches of {batch}' if batch > 1 else ''}, greedy, at most {max_new_tokens} new "
        f"tokens. Speed-up: median over {'batches' if batch > 1 else 'prompts'}. {RULE if batch == 1 else ''}"
    )
    return f"{head}\n\n{table(results)}"
