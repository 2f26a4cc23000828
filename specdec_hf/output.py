"""What speculation did: the statistics that `generate` adds to its output. Rank 0."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .proposal import Round


@dataclass
class SpeculationStats:
    """Statistics of one `generate()` call.

    Found as `out.speculation` with `return_dict_in_generate=True`, and as `last_speculation(model)` in any case. The
    token that the prefill yields belongs to no round, so a row's new tokens number 1 + the sum of its accepted
    lengths (a stop inside the last block can commit fewer than were accepted).

    Args:
        strategy: name of the drafter, `"plain"` where decoding fell back.
        accepted_lengths: per row, per round: tokens that the round gained, bonus token counted.
        proposal_lengths: per row, per round: drafted tokens that the target verified, bonus token not counted; of a
            tree, its nodes.
        proposal_depths: the same in a chain; of a tree, its depth, which is how many of them can be accepted.
        seconds: wall time by part: `"draft"`, `"target"` (prefill not included), `"other"`, and `"prefill"`. On an
            accelerator the host's time: kernels still running when a part ends count for the part that waits.
        fallback: why decoding was plain, None where it was not.
        forward_passes: of the target, the prefill's not counted.
        paused_rounds: rounds (of the whole batch) that were plain because drafting did not pay, see `automatic_off`;
            they count as rounds that drafted nothing.
    """

    strategy: str
    accepted_lengths: list[list[int]] = field(default_factory=list)
    proposal_lengths: list[list[int]] = field(default_factory=list)
    accepted_draft_tokens: list[list[int]] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: {"draft": 0.0, "target": 0.0, "other": 0.0, "prefill": 0.0}
    )
    fallback: str | None = None
    forward_passes: int = 0
    proposal_depths: list[list[int]] = field(default_factory=list)
    paused_rounds: int = 0

    def __post_init__(self) -> None:
        self.proposal_depths = self.proposal_depths or [list(own) for own in self.proposal_lengths]

    @classmethod
    def of_rows(cls, strategy: str, rows: int) -> SpeculationStats:
        """Empty statistics of a call with that many rows."""
        return cls(strategy, [[] for _ in range(rows)], [[] for _ in range(rows)], [[] for _ in range(rows)])

    @property
    def rounds(self) -> int:
        """Rounds summed over rows: one row in one target forward is one round."""
        return sum(len(row) for row in self.accepted_lengths)

    @property
    def drafted(self) -> int:
        """Drafted tokens that the target verified, summed over rows."""
        return sum(map(sum, self.proposal_lengths))

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted, summed over rows (bonus tokens not counted)."""
        return sum(map(sum, self.accepted_draft_tokens))

    @property
    def mean_accepted_length(self) -> float:
        """tau: mean tokens gained per round, bonus token counted; 0.0 before the first round."""
        return sum(map(sum, self.accepted_lengths)) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry k: share of the rounds drafting k + 1 places ahead or further that accepted a token at that place.

        In a chain that is the accepted share of the tokens drafted there; in a tree, a place is a depth, at which one
        of several drafted tokens can be accepted.
        """
        width = max((length for row in self.proposal_depths for length in row), default=0)
        proposed, accepted = [0] * width, [0] * width
        for lengths, kept in zip(self.proposal_depths, self.accepted_draft_tokens, strict=True):
            for drafted, good in zip(lengths, kept, strict=True):
                for place in range(drafted):
                    proposed[place] += 1
                    accepted[place] += place < good
        return [good / tried for good, tried in zip(accepted, proposed, strict=True)]

    def record(self, row: int, round_: Round) -> None:
        """Add one round of one row."""
        self.accepted_lengths[row].append(round_.accepted + 1)
        self.proposal_lengths[row].append(round_.proposed)
        self.proposal_depths[row].append(round_.acceptable)
        self.accepted_draft_tokens[row].append(round_.accepted)

    def summary(self) -> dict[str, Any]:
        """The scalar figures as a plain dictionary, ready for JSON."""
        return {
            "strategy": self.strategy,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_by_position": self.acceptance_by_position,
            "seconds": dict(self.seconds),
            "paused_rounds": self.paused_rounds,
            "fallback": self.fallback,
        }


class Stopwatch:
    """Shares out wall time among the parts of `SpeculationStats.seconds`; what no part claims goes to `"other"`."""

    def __init__(self, stats: SpeculationStats) -> None:
        self._stats = stats
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time spent inside the block for part `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stats.seconds[name] += time.perf_counter() - start

    def stop(self) -> None:
        """Book all time since construction that no part has claimed as `"other"`."""
        seconds = self._stats.seconds
        claimed = sum(value for name, value in seconds.items() if name != "other")
        seconds["other"] = max(time.perf_counter() - self._started - claimed, 0.0)


class StepOutputs:
    """Collects what `generate(return_dict_in_generate=True)` returns per generated token, though blocks yield several.

    Args:
        batch_size: rows B of the call.
        wanted: which of "scores", "logits", "hidden_states", "attentions" to keep.
        windows: sliding window of each layer in slots, None for full attention.
    """

    def __init__(self, batch_size: int, wanted: set[str], windows: list[int | None]) -> None:
        self.wanted = wanted
        self._windows = windows
        self._rows: dict[str, list[list[Any]]] = {name: [[] for _ in range(batch_size)] for name in wanted}
        self._first: dict[str, Any] = {}

    def prefill(self, outputs: Any) -> None:
        """Keep the prompt's own states, which stand for the first token."""
        for name in ("hidden_states", "attentions"):
            if name in self.wanted:
                self._first[name] = getattr(outputs, name)

    def add(self, number: int, row: int, place: int, scores: Any, logits: Any) -> None:
        """One committed token of the call's row `number`: `scores` and `logits` [B, S, V] at `row` and `place`."""
        for name, tensor in (("scores", scores), ("logits", logits)):
            if name in self.wanted:
                self._rows[name][number].append(tensor[row, place])

    def add_states(self, number: int, row: int, place: int, outputs: Any, slot: int, block_end: int) -> None:
        """Hidden states and attentions of the place in a block that yielded a token.

        Args:
            slot: that place's slot in the cache.
            block_end: one past the last slot of the forward, where the attention maps end.
        """
        if "hidden_states" in self.wanted:
            states = tuple(layer[row, place : place + 1] for layer in outputs.hidden_states)
            self._rows["hidden_states"][number].append(states)
        if "attentions" in self.wanted:
            maps = []
            for attention, window in zip(outputs.attentions, self._windows, strict=True):
                visible = slot + 1 if window is None else min(slot + 1, window)
                end = attention.shape[-1] - (block_end - 1 - slot)
                maps.append(attention[row, :, place : place + 1, end - visible : end])
            self._rows["attentions"][number].append(tuple(maps))

    def result(self, name: str) -> tuple[Any, ...] | None:
        """The tuple with one entry a generated token, as plain decoding returns it; None if it was not asked for.

        Rows that ended earlier than others hold zeros in the entries beyond their end.
        """
        if name not in self.wanted:
            return None
        rows = self._rows[name]
        steps = [[row[t] if t < len(row) else None for row in rows] for t in range(max(map(len, rows)))]
        if name in ("scores", "logits"):
            return tuple(_stacked(entries) for entries in steps)
        layers = range(len(self._first[name]))
        later = tuple(tuple(_stacked([e and e[i] for e in entries]) for i in layers) for entries in steps)
        return (self._first[name], *later)


def _stacked(entries: list[Any]) -> Any:
    present = next(entry for entry in entries if entry is not None)
    return torch.stack([present.new_zeros(present.shape) if entry is None else entry for entry in entries])
