"""One answer of a target, decoded plainly or with a head, timed token by token; and the figures of several. Batch 1.

Figures are taken from the text before it begins to repeat itself (`repetition`). For the accepted length, rounds are
counted that end within that text, so a round that the cut falls into is left out. The speed counts to the end of the
last such round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .generation import last_speculation
from .repetition import repeats_from

ULPS = 4
"""A greedy difference whose two best logits lie at most this many times the dtype's spacing apart is a near tie."""


class Counts(NamedTuple):
    """One round: tokens verified, how many of them could be accepted (of a tree: its depth), were, and were gained.

    `committed` has the bonus token, clipped to what stands in the text where a stop token ends it.
    """

    drafted: int
    acceptable: int
    accepted: int
    committed: int


@dataclass(frozen=True)
class Answer:
    """One call of `generate()`.

    Attributes:
        tokens: new token ids.
        arrivals: seconds from the start of the call to each token's arrival, the prompt included.
        rounds: of a speculative call, its rounds after the prompt.
        seconds: of a speculative call, `SpeculationStats.seconds`.
    """

    tokens: list[int]
    arrivals: list[float]
    rounds: list[Counts] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def keep(self) -> int:
        """Tokens that count: of plain decoding those before the cut, of speculation those of the rounds counted."""
        cut = repeats_from(self.tokens)
        if not self.rounds:
            return cut
        return 1 + sum(round_.committed for round_ in self.counted())

    def counted(self) -> list[Counts]:
        """The rounds that end within the text before the cut. The prompt's own forward yields the first token."""
        cut, end, counted = repeats_from(self.tokens), 1, list[Counts]()
        for round_ in self.rounds:
            end += round_.committed
            if end > cut:
                break
            counted.append(round_)
        return counted

    def seconds_for(self, tokens: int) -> float:
        """Seconds until the first ``tokens`` tokens had arrived."""
        return self.arrivals[tokens - 1]


@dataclass(frozen=True)
class Difference:
    """Where greedy speculation parts from plain decoding.

    Attributes:
        source: the prompt. place: 0-based index of the first new token that differs.
        plain_token, draft_token: the ids there.
        gap: difference of the target's two best logits there. spacing: the dtype's spacing at the best logit.
    """

    source: str
    place: int
    plain_token: int | None
    draft_token: int | None
    gap: float
    spacing: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding can explain it."""
        return self.gap <= ULPS * self.spacing


class _Clock:
    """A streamer that notes when each token arrives."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter() - self.start)

    def end(self) -> None:
        pass


def answer(
    model: Any, head: Any | None, ids: torch.Tensor, budget: int, temperature: float = 0.0, seed: int = 0, **knobs: Any
) -> Answer:
    """One call of `generate()`, timed token by token.

    Args:
        model: the target, speculation enabled.
        head: the draft head; None decodes plainly.
        ids: prompt [1, L].
        budget: most new tokens.
        temperature: 0 is greedy.
        seed: of torch's random numbers, whose state is left as it was.
        knobs: further arguments of `generate()`.

    Raises:
        ValueError: the target cannot speculate (it would decode plainly).
    """
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    assisted = {} if head is None else {"assistant_model": head}
    devices = [ids.device] if ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        clock = _Clock()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=clock,
            max_new_tokens=budget,
            **sampling,
            **assisted,
            **knobs,
        )
    tokens = out[0, ids.shape[1] :].tolist()
    arrivals = clock.times[1 : 1 + len(tokens)]  # the first entry is the prompt
    if head is None:
        return Answer(tokens, arrivals)
    stats = last_speculation(model)
    assert stats is not None
    if stats.fallback is not None:
        raise ValueError(f"this target cannot speculate: {stats.fallback}. There is nothing to evaluate.")
    rounds, left = [], len(tokens) - 1
    columns = (stats.proposal_lengths, stats.proposal_depths, stats.accepted_draft_tokens, stats.accepted_lengths)
    for drafted, acceptable, accepted, gained in zip(*(column[0] for column in columns), strict=True):
        rounds.append(Counts(drafted, acceptable, accepted, min(gained, left)))
        left -= rounds[-1].committed
    return Answer(tokens, arrivals, rounds, dict(stats.seconds))


def acceptance(rounds: Sequence[Counts]) -> dict[str, Any]:
    """Accepted length and acceptance by position (of a tree: by depth).

    Returns:
        ``rounds``, ``drafted``, ``accepted``, ``rejected`` (verified but not accepted); ``rate`` = accepted / drafted;
        ``tau`` = mean committed tokens per round, bonus token counted; ``survival``: entry k is the share of rounds
        that drafted k + 1 tokens in a line and accepted as many; ``conditional``: the same share among those whose
        first k were accepted, which number ``reached``; ``lengths``: entry n counts rounds that committed n tokens.
    """
    width = max((r.acceptable for r in rounds), default=0)
    tried = [sum(r.acceptable > k for r in rounds) for k in range(width)]
    reached = [sum(r.acceptable > k and r.accepted >= k for r in rounds) for k in range(width)]
    passed = [sum(r.acceptable > k and r.accepted > k for r in rounds) for k in range(width)]
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    longest = max((r.committed for r in rounds), default=0)
    return {
        "rounds": len(rounds),
        "drafted": drafted,
        "accepted": accepted,
        "rejected": drafted - accepted,
        "rate": accepted / drafted if drafted else None,
        "tau": mean([r.committed for r in rounds]),
        "survival": [good / all_ for good, all_ in zip(passed, tried, strict=True)],
        "reached": reached,
        "conditional": [good / before if before else None for good, before in zip(passed, reached, strict=True)],
        "lengths": [sum(r.committed == n for r in rounds) for n in range(longest + 1)],
    }


def speed(pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
    """Plain decoding against speculation, prompt included, up to the cut.

    Both answers count up to the same token where they are the same text (greedy), each to its own cut else.

    Args:
        pairs: (plain, speculative).

    Returns:
        tokens per second of both (all tokens / all seconds), ``total`` = their ratio, ``median`` = ratio of the medians
        over prompts of seconds per token, ``each`` = the ratio for every prompt.
    """
    rows = []
    for plain, drafted in pairs:
        keep = drafted.keep
        same = plain.tokens[:keep] == drafted.tokens[:keep]
        plain_keep = keep if same else plain.keep
        rows.append((plain_keep, plain.seconds_for(plain_keep), keep, drafted.seconds_for(keep)))
    plain_speed = sum(r[0] for r in rows) / sum(r[1] for r in rows)
    draft_speed = sum(r[2] for r in rows) / sum(r[3] for r in rows)
    plain_steps, draft_steps = [r[1] / r[0] for r in rows], [r[3] / r[2] for r in rows]
    return {
        "plain_tokens_per_second": plain_speed,
        "draft_tokens_per_second": draft_speed,
        "total": draft_speed / plain_speed,
        "median": statistics.median(plain_steps) / statistics.median(draft_steps),
        "each": [a / b for a, b in zip(plain_steps, draft_steps, strict=True)],
    }


def first_difference(
    model: Any, ids: torch.Tensor, plain: Sequence[int], drafted: Sequence[int], source: str
) -> Difference | None:
    """Where two greedy answers to one prompt part, with the target's two best logits there; None if nowhere."""
    if list(plain) == list(drafted):
        return None
    shared = min(len(plain), len(drafted))
    place = next((i for i in range(shared) if plain[i] != drafted[i]), shared)
    prefix = torch.cat((ids, ids.new_tensor([list(plain[:place])])), dim=1)
    out = model.generate(
        prefix, attention_mask=torch.ones_like(prefix), do_sample=False, max_new_tokens=1, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    best = out.logits[0][0].float().topk(2).values.tolist()
    spacing = torch.finfo(model.dtype).eps * max(abs(best[0]), 1.0)
    tokens = [text[place] if place < len(text) else None for text in (plain, drafted)]
    return Difference(source, place, tokens[0], tokens[1], best[0] - best[1], spacing)


def mean(values: Sequence[float]) -> float | None:
    """The mean, None of nothing."""
    return sum(values) / len(values) if values else None
