"""What a head gains on prompts of one's own: `specdec eval`. Calls the public `generate()` only, as a user would.

Every prompt is answered by plain decoding and by speculation, one right after the other and in alternating order. Batch
1. `answers` says what is counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .answers import Answer, Difference, acceptance, answer, first_difference, mean, speed
from .generation import enable_speculation
from .loading import DTYPES, Pair, load_pair
from .options import SpeculativeConfig
from .plots import require_matplotlib
from .prompts import Conversation, encode, read_conversations
from .provenance import provenance
from .repetition import RULE, repeats_from
from .report import write_report

THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        limit: conversations of each file; None = all.
        max_new_tokens: budget of one answer.
        temperatures: 0 is greedy; else sampling from the whole vocabulary (no top-k, no top-p) at that temperature.
        thresholds: confidence thresholds of the sweep; empty = no sweep.
        sweep_prompts: prompts of each file in the sweep.
        all_turns: answer every turn of a conversation, not only the first.
        seed: of the sampling; set anew before every call.
        speculation: how to draft.
    """

    limit: int | None = 40
    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)
    thresholds: tuple[float, ...] = THRESHOLDS
    sweep_prompts: int = 4
    all_turns: bool = False
    seed: int = 0
    speculation: SpeculativeConfig = field(default_factory=lambda: SpeculativeConfig("dspark"))

    def __post_init__(self) -> None:
        for name, low in (("limit", 1), ("max_new_tokens", 2), ("sweep_prompts", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name}={value}: it must be at least {low}")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures={list(self.temperatures)}: give at least one, none below 0 (0 is greedy)")
        for threshold in self.thresholds:
            if not 0 <= threshold <= 1:
                raise ValueError(f"threshold {threshold}: it is compared with a probability and must lie in [0, 1]")


class _Run:
    """One evaluation under way: a loaded pair, its prompts by data set, and what to measure."""

    def __init__(self, pair: Pair, sets: dict[str, list[Conversation]], settings: Settings) -> None:
        self.model, self.head, self.tokenizer = enable_speculation(pair.model), pair.head, pair.tokenizer
        self.sets, self.settings = sets, settings
        self.prompts: dict[str, list[torch.Tensor]] = {}
        text = pair.model.config.get_text_config(decoder=True)
        self.window = getattr(text, "max_position_embeddings", None)
        self.order = 0  # whose turn it is to go first

    def encode(self, messages: list[dict[str, str]]) -> torch.Tensor | None:
        """Ids on the target's device, None if prompt and answer do not fit its window."""
        ids = encode(self.tokenizer, messages).to(self.model.device)
        fits = self.window is None or ids.shape[1] + self.settings.max_new_tokens <= self.window
        return ids if fits else None

    def call(self, ids: torch.Tensor, speculative: bool, temperature: float, **knobs: Any) -> Answer:
        head = self.head if speculative else None
        budget = knobs.pop("budget", self.settings.max_new_tokens)
        if speculative:
            knobs = {"speculative": replace(self.settings.speculation, **knobs)}
        return answer(self.model, head, ids, budget, temperature, self.settings.seed, **knobs)

    def both(self, ids: torch.Tensor, temperature: float) -> tuple[Answer, Answer]:
        """(plain, speculative), each going first every other time, so that neither always meets the warmer machine."""
        self.order += 1
        answers = {s: self.call(ids, s, temperature) for s in ((True, False) if self.order % 2 else (False, True))}
        return answers[False], answers[True]

    def warm_up(self) -> None:
        for conversations in self.sets.values():
            ids = self.encode(conversations[0].turns[0].messages)
            if ids is not None:
                for speculative in (False, True):
                    self.call(ids, speculative, 0.0, budget=8)
                return

    def conversation(
        self, conversation: Conversation, temperature: float
    ) -> Iterator[tuple[str, torch.Tensor, Answer, Answer] | None]:
        """(source, prompt, plain, speculative) a turn; None for a turn that does not fit, which ends it."""
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(conversation.turns if self.settings.all_turns else conversation.turns[:1], 1):
            messages += turn.messages
            ids = self.encode(messages)
            if ids is None:
                yield None
                return
            plain, drafted = self.both(ids, temperature)
            yield f"{conversation.source} turn {number}", ids, plain, drafted
            own = self.tokenizer.decode(plain.tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": turn.answer or own})

    def data_set(self, name: str, temperature: float) -> dict[str, Any]:
        """All figures of one data set at one temperature."""
        pairs, differences, left_out = [], [], 0
        for conversation in tqdm(self.sets[name], desc=f"{name}, T = {temperature:g}", unit="prompt", leave=False):
            for turn in self.conversation(conversation, temperature):
                if turn is None:
                    left_out += 1
                    continue
                source, ids, plain, drafted = turn
                pairs.append((plain, drafted))
                if temperature == 0:
                    differences.append(first_difference(self.model, ids, plain.tokens, drafted.tokens, source))
        if not pairs:
            raise ValueError(
                f"{name}: no prompt fits the target's {self.window} positions together with max_new_tokens="
                f"{self.settings.max_new_tokens}; lower it, or take shorter prompts."
            )
        answers = [drafted for _, drafted in pairs]
        seconds = {part: sum(one.seconds[part] for one in answers) for part in answers[0].seconds}
        found = [d for d in differences if d is not None]
        return {
            "data": name,
            "temperature": temperature,
            "answers": len(pairs),
            "left_out": left_out,
            "tokens": sum(one.keep for one in answers),
            "tokens_uncut": sum(len(one.tokens) for one in answers),
            "cut": sum(repeats_from(one.tokens) < len(one.tokens) for one in answers),
            **acceptance([round_ for one in answers for round_ in one.counted()]),
            "tau_uncut": acceptance([round_ for one in answers for round_ in one.rounds])["tau"],
            "tau_each": [acceptance(one.counted())["tau"] for one in answers],
            "speed_up": speed(pairs),
            "seconds": seconds,
            "lossless": self.lossless(found, len(differences)) if temperature == 0 else None,
        }

    def lossless(self, found: list[Difference], compared: int) -> dict[str, Any]:
        """The verdict on greedy equality: in float32 none may differ, in 16 bits only at near ties."""
        exact = self.model.dtype in (torch.float32, torch.float64)
        ties = sum(difference.near_tie for difference in found)
        good = not found or (not exact and ties == len(found))
        verdict = "failed" if not good else "near ties" if found else "equal"
        rows = [{**asdict(difference), "near_tie": difference.near_tie} for difference in found]
        return {
            "verdict": verdict,
            "compared": compared,
            "different": len(found),
            "near_ties": ties,
            "differences": rows,
        }

    def sweep(self) -> list[dict[str, Any]]:
        """Greedy decoding at every confidence threshold, on the first prompts of each data set (first turns)."""
        results = []
        prompts = {
            name: [self.encode(one.turns[0].messages) for one in conversations[: self.settings.sweep_prompts]]
            for name, conversations in self.sets.items()
        }
        todo = [(threshold, name) for threshold in self.settings.thresholds for name in prompts]
        for threshold, name in tqdm(todo, desc="threshold sweep", leave=False):
            answers = [
                self.call(ids, True, 0.0, assistant_confidence_threshold=threshold)
                for ids in prompts[name]
                if ids is not None
            ]
            if answers:
                figures = acceptance([round_ for one in answers for round_ in one.counted()])
                kept = ("rounds", "drafted", "accepted", "rejected", "rate", "tau")
                seconds = sum(one.seconds_for(one.keep) for one in answers)
                results.append(
                    {
                        "threshold": threshold,
                        "data": name,
                        "answers": len(answers),
                        **{key: figures[key] for key in kept},
                        "tokens_per_second": sum(one.keep for one in answers) / seconds,
                    }
                )
        return results


def evaluate(pair: Pair, sets: dict[str, list[Conversation]], settings: Settings | None = None) -> dict[str, Any]:
    """Measure a head on prompts.

    Args:
        pair: target, tokenizer and head.
        sets: conversations by the data set's name.
        settings: what to measure.

    Returns:
        A JSON-ready record: ``results`` (one per data set and temperature, see `acceptance` and `speed`), ``macro``
        (means over data sets), ``sweep``, ``rule`` (how texts are cut), ``provenance``.

    Raises:
        ValueError: head and target do not fit, or no prompt fits the target.
    """
    settings = settings or Settings()
    run = _Run(pair, sets, settings)
    run.warm_up()
    results = [run.data_set(name, temperature) for temperature in settings.temperatures for name in sets]
    macro = []
    for temperature in settings.temperatures:
        rows = [row for row in results if row["temperature"] == temperature]
        macro.append(
            {
                "temperature": temperature,
                "tau": mean([row["tau"] for row in rows if row["tau"] is not None]),
                "median": mean([row["speed_up"]["median"] for row in rows]),
                "total": mean([row["speed_up"]["total"] for row in rows]),
            }
        )
    wants_sweep = bool(settings.thresholds) and pair.head.config.enable_confidence_head
    return {
        "target": pair.target,
        "draft": pair.draft,
        "rule": RULE,
        "results": results,
        "macro": macro,
        "sweep": run.sweep() if wants_sweep else [],
        "provenance": provenance(**_settings_of(pair, sets, settings)),
    }


def _settings_of(pair: Pair, sets: dict[str, list[Conversation]], settings: Settings) -> dict[str, Any]:
    return {
        **vars(settings),
        "speculation": {
            name: value
            for name, value in vars(settings.speculation).items()
            if value != getattr(SpeculativeConfig, name)
        },
        "prompts": {name: len(conversations) for name, conversations in sets.items()},
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if pair.model.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "target_parameters": pair.model.num_parameters(),
        "head_parameters": pair.head.num_parameters(),
        "confidence_temperatures": pair.head.config.confidence_temperatures,
    }


def estimate(pair: Pair, sets: dict[str, list[Conversation]], settings: Settings, tokens: int = 12) -> dict[str, Any]:
    """How long `evaluate` would take if every answer used its whole budget, from a few timed tokens of each data set.

    Args:
        pair, sets, settings: as for `evaluate`.
        tokens: new tokens of each of the timed calls (two a data set, after one that warms up).

    Returns:
        ``calls``, ``seconds`` (an upper bound for texts like these), ``plain_step`` and ``draft_step`` (seconds per
        token).
    """
    run = _Run(pair, sets, settings)
    run.warm_up()
    calls, seconds, steps = 0, 0.0, []
    for conversations in sets.values():
        ids = run.encode(conversations[0].turns[0].messages)
        if ids is None:
            continue
        timed = [run.call(ids, speculative, 0.0, budget=tokens) for speculative in (False, True)]
        first = sum(one.arrivals[0] for one in timed)  # the prompt
        step = [(one.arrivals[-1] - one.arrivals[0]) / max(len(one.tokens) - 1, 1) for one in timed]
        steps.append(step)
        answers = sum(len(one.turns) if settings.all_turns else 1 for one in conversations) * len(settings.temperatures)
        swept = min(settings.sweep_prompts, len(conversations)) * len(settings.thresholds)
        calls += 2 * answers + swept
        seconds += answers * (first + sum(step) * settings.max_new_tokens)
        seconds += swept * (first / 2 + step[1] * settings.max_new_tokens)
    plain, drafted = (statistics.fmean(column) if column else 0.0 for column in zip(*steps, strict=True))
    return {"calls": calls, "seconds": seconds, "plain_step": plain, "draft_step": drafted}


def estimate_text(estimate: dict[str, Any]) -> str:
    """The result of `estimate` in words."""
    minutes = estimate["seconds"] / 60
    length = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"
    return (
        f"about {length} at most, {estimate['calls']} calls of generate() (if every answer used its whole "
        f"budget): {1e3 * estimate['plain_step']:.1f} ms a token plainly, {1e3 * estimate['draft_step']:.1f} ms with "
        "the head, measured on a few tokens of each data set"
    )


def run_evaluation(
    data: Sequence[Path],
    target: str | None = None,
    draft: str | None = None,
    dtype: str = DTYPES[0],
    settings: Settings | None = None,
    threads: int | None = None,
    output: Path | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Read prompts, load target and head, measure, write JSON and HTML: all of `specdec eval`.

    Args:
        data: JSONL files (see `prompts`); a file's name without its ending is the data set's name.
        target, draft, dtype: see `loading.load_pair`.
        settings: what to measure.
        threads: CPU threads; None leaves torch's choice.
        output: directory for `eval.json` and `report.html`, or None.
        dry_run: only time a few steps and return `estimate`.

    Raises:
        ValueError, OSError: prompts or models that cannot be read. ImportError: ``output`` without matplotlib.
    """
    settings = settings or Settings()
    sets: dict[str, list[Conversation]] = {}
    for path in map(Path, data):
        name = path.stem if path.stem not in sets else str(path)
        sets[name] = read_conversations(path, settings.limit)
    if not sets:
        raise ValueError("no prompts: name at least one JSONL file with --data")
    if output is not None and not dry_run:
        require_matplotlib("the report's plots")
        output.mkdir(parents=True, exist_ok=True)
    if threads is not None:
        torch.set_num_threads(threads)
    pair = load_pair(target, draft, dtype)
    if dry_run:
        return estimate(pair, sets, settings)
    result = evaluate(pair, sets, settings)
    if output is not None:
        write_report(result, output)
    return result
