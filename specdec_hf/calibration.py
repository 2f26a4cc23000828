"""Calibrating a head's confidence: `specdec calibrate`. Sequential temperature scaling on rounds of `generate()`.

The confidence head says c_k, the probability that drafted token k survives if those before it did; what the threshold
and a scheduler use are these and their products a_k = c_1 ... c_k. For k = 1, 2, ... in order, a grid search finds the
temperature that divides the logit of c_k and minimises the expected calibration error (ECE) of a_k, the earlier ones
fixed (DSpark, section on confidence calibration). Cutting a block by confidence is lossless whatever the temperatures
are.

Rounds are those of public `generate()` calls that verify whole blocks; a forward hook on the confidence head notes its
logits.
"""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from . import plots
from .answers import answer
from .generation import enable_speculation
from .loading import DTYPES, Pair, load_pair
from .prompts import Conversation, encode, read_conversations
from .provenance import provenance
from .repetition import RULE

BINS = 10
"""Bins of equal width for the ECE."""
GRID = tuple(10 ** (step / 80) for step in range(-80, 81))
"""Temperatures tried: 0.1 to 10 in steps of 3 %; 1 is among them."""
MIN_ROUNDS = 40
"""Fewer rounds than this (in each half) say nothing about calibration."""
MIN_OUTCOMES = 10
"""A place is fitted if at least so many tokens survived there and so many did not."""


@dataclass(frozen=True)
class Rounds:
    """What the confidence head said and what became of it. N rounds, P proposals in a block.

    Attributes:
        logits: float64 [N, P], logit of c_k before any temperature; NaN where a round drafted fewer tokens.
        accepted: int64 [N], drafted tokens that were accepted.
    """

    logits: Tensor
    accepted: Tensor

    def place(self, k: int) -> tuple[Tensor, Tensor]:
        """(rows [n] of the rounds that drafted k + 1 tokens, survived [n] 0/1: all k + 1 were accepted)."""
        rows = (~self.logits[:, k].isnan()).nonzero().flatten()
        return rows, (self.accepted[rows] > k).double()


@contextmanager
def confidence_logits(head: Any) -> Iterator[list[float]]:
    """Collects the logit of every drafted token's confidence, in the order of drafting (batch 1), while it is open.

    Raises:
        ValueError: the head has no confidence head.
    """
    if head.confidence_head is None:
        raise ValueError(
            "this draft head has no confidence head (enable_confidence_head=False), so there is nothing to calibrate: "
            "train one with enable_confidence_head=True"
        )
    noted: list[float] = []
    handle = head.confidence_head.register_forward_hook(lambda module, inputs, output: noted.append(output.item()))
    try:
        yield noted
    finally:
        handle.remove()


def record_rounds(
    pair: Pair, conversations: Sequence[Conversation], temperatures: Sequence[float], max_new_tokens: int, seed: int = 0
) -> list[Rounds]:
    """Answer the first turn of each conversation at each temperature; the rounds of every answer.

    Rounds beyond the point where an answer begins to repeat itself are left out (`repetition`).

    Args:
        pair: target, tokenizer and head.
        conversations: prompts that the head was not trained on.
        temperatures: of the sampling; 0 is greedy.
        max_new_tokens: budget of one answer.
        seed: of the sampling.

    Returns:
        One `Rounds` a conversation, all temperatures together.
    """
    model = enable_speculation(pair.model)
    width = pair.head.max_draft_tokens
    results = []
    for conversation in tqdm(conversations, desc="recording rounds", unit="prompt", leave=False):
        ids = encode(pair.tokenizer, conversation.turns[0].messages).to(model.device)
        rows: list[list[float]] = []
        accepted: list[int] = []
        for temperature in temperatures:
            with confidence_logits(pair.head) as noted:
                one = answer(
                    model, pair.head, ids, max_new_tokens, temperature, seed, assistant_confidence_threshold=0.0
                )
            left = iter(noted)
            for round_ in one.counted():
                row = [next(left) for _ in range(round_.drafted)]
                rows.append(row + [float("nan")] * (width - round_.drafted))
                accepted.append(round_.accepted)
        logits = torch.tensor(rows, dtype=torch.float64).reshape(-1, width)
        results.append(Rounds(logits, torch.tensor(accepted, dtype=torch.long)))
    return results


def merge(parts: Sequence[Rounds]) -> Rounds:
    """All rounds together."""
    return Rounds(torch.cat([part.logits for part in parts]), torch.cat([part.accepted for part in parts]))


def survival(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """a_k [N, P]: products of the calibrated confidences along the block, of logits [N, P]."""
    return torch.sigmoid(logits / torch.tensor(temperatures, dtype=logits.dtype)).cumprod(dim=1)


def calibration_bins(predicted: Tensor, survived: Tensor) -> list[tuple[float, float, int]]:
    """(mean prediction, observed share, rounds) of each bin that is not empty; predictions and outcomes [n]."""
    index = (predicted * BINS).long().clamp(0, BINS - 1)
    bins = []
    for one in range(BINS):
        inside = index == one
        if bool(inside.any()):
            bins.append((float(predicted[inside].mean()), float(survived[inside].mean()), int(inside.sum())))
    return bins


def calibration_error(predicted: Tensor, survived: Tensor) -> Tensor:
    """ECE of predictions [..., n] for outcomes [n]: mean over rounds of |observed - predicted| of their bin, in [0, "
    "1].
    """
    index = (predicted * BINS).long().clamp(0, BINS - 1)
    gaps = predicted.new_zeros(*predicted.shape[:-1], BINS).scatter_add_(-1, index, survived - predicted)
    return gaps.abs().sum(dim=-1) / predicted.shape[-1]


def error_by_chance(predicted: Tensor) -> float:
    """ECE to expect of *perfect* predictions [n], from the finite number of rounds alone (normal approximation)."""
    index = (predicted * BINS).long().clamp(0, BINS - 1)
    variance = predicted.new_zeros(BINS).scatter_add_(0, index, predicted * (1 - predicted))
    return float((2 / torch.pi * variance).sqrt().sum() / predicted.shape[0])


def area_under_curve(predicted: Tensor, survived: Tensor) -> float | None:
    """AUC: probability that a surviving round got the higher prediction (ties count half); None if all ended alike."""
    positives = float(survived.sum())
    negatives = survived.shape[0] - positives
    if not positives or not negatives:
        return None
    _, inverse, counts = predicted.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
    return (float((ranks * survived).sum()) - positives * (positives + 1) / 2) / (positives * negatives)


def fit_temperatures(rounds: Rounds) -> list[float]:
    """The temperatures, one a place, by sequential grid search.

    A place where fewer than ``MIN_OUTCOMES`` tokens survived (or failed) takes the temperature of the one before it:
    there the search would only learn to say "never". Among equal errors the temperature nearest to 1 wins.
    """
    found: list[float] = []
    before = torch.ones(rounds.logits.shape[0], dtype=torch.float64)  # a_{k-1} of every round
    grid = torch.tensor(sorted(GRID, key=lambda t: abs(torch.tensor(t).log().item())), dtype=torch.float64)
    for k in range(rounds.logits.shape[1]):
        rows, survived = rounds.place(k)
        rarer = min(float(survived.sum()), float((1 - survived).sum()))
        if rarer < MIN_OUTCOMES:
            found.append(found[-1] if found else 1.0)
            before = before * torch.sigmoid(rounds.logits[:, k] / found[-1])
            continue
        tried = torch.stack(
            [calibration_error(before[rows] * torch.sigmoid(rounds.logits[rows, k] / t), survived) for t in grid]
        )
        found.append(float(grid[int(tried.argmin())]))
        before = before * torch.sigmoid(rounds.logits[:, k] / found[-1])
    return found


def assess(rounds: Rounds, temperatures: Sequence[float]) -> list[dict[str, Any]]:
    """How well a_k predicts survival, per place: ``rounds``, ``observed`` (share that survived), ``predicted`` (mean
    a_k), ``ece``, ``ece_by_chance`` (see `error_by_chance`), ``auc``, ``bins``.
    """
    predicted = survival(rounds.logits, temperatures)
    figures = []
    for k in range(predicted.shape[1]):
        rows, survived = rounds.place(k)
        if not len(rows):
            continue
        own = predicted[rows, k]
        figures.append(
            {
                "place": k + 1,
                "rounds": len(rows),
                "observed": float(survived.mean()),
                "predicted": float(own.mean()),
                "ece": float(calibration_error(own, survived)),
                "ece_by_chance": error_by_chance(own),
                "auc": area_under_curve(own, survived),
                "bins": calibration_bins(own, survived),
            }
        )
    return figures


def calibrate(parts: Sequence[Rounds], present: Sequence[float] | None = None) -> dict[str, Any]:
    """Fit on every other prompt, assess on the rest.

    Args:
        parts: the rounds of each prompt.
        present: temperatures that the head has now; None = 1 everywhere.

    Returns:
        ``temperatures``, and ``before`` / ``after`` (see `assess`) on the prompts that were not fitted on.

    Raises:
        ValueError: too few rounds in one half.
    """
    fitted, held = parts[::2], parts[1::2]
    counts = [sum(part.accepted.shape[0] for part in half) for half in (fitted, held)]
    if min(counts) < MIN_ROUNDS:
        raise ValueError(
            f"{counts[0]} rounds to fit and {counts[1]} to assess: at least {MIN_ROUNDS} each are needed, and some "
            "thousands for a good fit. Give more prompts (--limit, --data) or more tokens (--max-new-tokens)."
        )
    temperatures = fit_temperatures(merge(fitted))
    rest = merge(held)
    return {
        "temperatures": temperatures,
        "rounds": {"fitted": counts[0], "assessed": counts[1]},
        "before": assess(rest, present or [1.0] * len(temperatures)),
        "after": assess(rest, temperatures),
    }


def table(result: dict[str, Any]) -> str:
    """The figures of `calibrate` as text."""
    lines = ["place  rounds  observed predicted  after     ECE   after by chance    AUC  after temperature"]
    for before, after in zip(result["before"], result["after"], strict=True):
        auc = ["-" if one["auc"] is None else f"{one['auc']:.3f}" for one in (before, after)]
        lines.append(
            f"{before['place']:>5} {before['rounds']:>7} {before['observed']:>9.3f} {before['predicted']:>9.3f} "
            f"{after['predicted']:>6.3f} {before['ece']:>7.2%} {after['ece']:>7.2%} {after['ece_by_chance']:>9.2%} "
            f"{auc[0]:>6} {auc[1]:>6} {result['temperatures'][before['place'] - 1]:>11.3f}"
        )
    note = (
        "Survival of a drafted token with all before it: observed, and predicted before and after. Fitted on every "
        f"other prompt, assessed on the rest. ECE with {BINS} bins; 'by chance' is what perfect predictions would show."
    )
    lines += textwrap.wrap(note, 118)
    return "\n".join(lines)


def diagram(result: dict[str, Any]) -> Any:
    """The reliability diagram as a matplotlib figure."""
    panels = {
        f"place {one['place']}: ECE {one['ece']:.1%} to {two['ece']:.1%}": {"before": one["bins"], "after": two["bins"]}
        for one, two in zip(result["before"], result["after"], strict=True)
    }
    return plots.reliability("Survival of drafted tokens, predicted and observed", panels)


def save_temperatures(source: str, directory: Path, temperatures: Sequence[float]) -> None:
    """Write the head in ``source`` with these temperatures to ``directory``. Weights are copied as they are.

    Args:
        source: the head's directory or Hub repository.
        directory: created if it is not there; may be ``source`` itself, where only `config.json` changes.
        temperatures: one a proposal.

    Raises:
        OSError: not readable or writable.
    """
    if not Path(source).is_dir():
        from huggingface_hub import snapshot_download

        source = snapshot_download(source)
    directory.mkdir(parents=True, exist_ok=True)
    if not directory.samefile(source):
        for path in Path(source).iterdir():
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["confidence_temperatures"] = [round(temperature, 6) for temperature in temperatures]
    unfinished = directory / ".config.json.part"
    unfinished.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(unfinished, directory / "config.json")


@dataclass(frozen=True)
class Settings:
    """What to record: conversations of each file (None = all), new tokens of an answer, sampling temperatures, seed."""

    limit: int | None = 40
    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, low in (("limit", self.limit, 2), ("max_new_tokens", self.max_new_tokens, 2)):
            if value is not None and value < low:
                raise ValueError(f"{name}={value}: it must be at least {low}")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures={list(self.temperatures)}: give at least one, none below 0 (0 is greedy)")


def run_calibration(
    data: Sequence[Path],
    target: str | None = None,
    draft: str | None = None,
    dtype: str = DTYPES[0],
    settings: Settings | None = None,
    threads: int | None = None,
    output: Path | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Read prompts, load target and head, record, fit, write: all of `specdec calibrate`.

    Args:
        data: JSONL files (see `prompts`) that the head was not trained on.
        target, draft, dtype: see `loading.load_pair`.
        settings: what to record.
        threads: CPU threads; None leaves torch's choice.
        output: directory for `calibration.json` and `reliability.png`, or None.
        save: directory for the head with its temperatures, or None; the head's own directory changes it in place.

    Raises:
        ValueError, OSError: prompts or models that cannot be read, no confidence head, too few rounds.
        ImportError: ``output`` without matplotlib.
    """
    settings = settings or Settings()
    conversations = [one for path in data for one in read_conversations(path, settings.limit)]
    if not conversations:
        raise ValueError("no prompts: name at least one JSONL file with --data")
    if output is not None:
        plots.require_matplotlib("the reliability diagram's plots")
        output.mkdir(parents=True, exist_ok=True)
    if threads is not None:
        torch.set_num_threads(threads)
    pair = load_pair(target, draft, dtype)
    parts = record_rounds(pair, conversations, settings.temperatures, settings.max_new_tokens, settings.seed)
    result = calibrate(parts, pair.head.config.confidence_temperatures)
    result = {
        "target": pair.target,
        "draft": pair.draft,
        **result,
        "rule": RULE,
        "provenance": provenance(
            **asdict(settings), prompts={Path(path).stem: settings.limit for path in data}, dtype=pair.dtype,
            threads=torch.get_num_threads(), bins=BINS,
        ),
    }  # fmt: skip
    if output is not None:
        (output / "calibration.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        plots.save_png(diagram(result), output / "reliability.png")
    if save is not None:
        save_temperatures(pair.draft_source, save, result["temperatures"])
    return result
