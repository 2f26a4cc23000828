"""How much to draft and how much of it to verify.

A policy decides from what is known *before* a token is drawn: a schedule sees rounds that are over, and the confidence
of token k depends on the tokens before it and never on token k itself (reference: DSpark, section on
confidence-scheduled verification). So shortening a block leaves the output distribution exactly the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .proposal import Round

if TYPE_CHECKING:
    from torch import Tensor

#: Rounds of a row over which `Adaptive` counts before it decides.
WINDOW = 4
#: How far the acceptance must lie from the target before `Adaptive` moves.
MARGIN = 0.1


@dataclass(frozen=True)
class Bounds:
    """What a schedule may choose from.

    Args:
        start: drafted tokens of a row's first round.
        minimum, maximum: limits of every round's number.
        acceptance_target: share of drafted tokens accepted that `Adaptive` steers to, in (0, 1).
    """

    start: int
    minimum: int
    maximum: int
    acceptance_target: float


class Schedule:
    """`"constant"`: every round drafts as many tokens as the first. Base of the others; host state only.

    Args:
        bounds: where it starts and what it may choose from.
        rows: rows B of the call; rows are named by their number in the call.
    """

    #: Whether a later call of the same target and drafter starts where this one ended.
    lasts = False

    def __init__(self, bounds: Bounds, rows: int) -> None:
        self._bounds = bounds
        self._tokens = [bounds.start] * rows

    @property
    def maximum(self) -> int:
        """The most tokens that any round may draft."""
        return self._bounds.start

    def limits(self, numbers: list[int]) -> list[int]:
        """Tokens that each of these rows may draft next."""
        return [self._tokens[number] for number in numbers]

    def learn(self, number: int, round_: Round) -> None:
        """Take in a round that is over."""

    @property
    def final(self) -> int:
        """Where the rows ended, on average: where a schedule that lasts starts the next call."""
        return round(sum(self._tokens) / len(self._tokens))

    def _move(self, number: int, step: int) -> None:
        bounds = self._bounds
        self._tokens[number] = min(max(self._tokens[number] + step, bounds.minimum), bounds.maximum)


class HeuristicTransient(Schedule):
    """`"heuristic_transient"`, as transformers (5.24, `update_candidate_strategy`) does it, for each row.

    Two tokens more after a round whose drafted tokens were all accepted, else one fewer. A round that drafted nothing
    teaches nothing.
    """

    @property
    def maximum(self) -> int:
        """The most tokens that any round may draft."""
        return self._bounds.maximum

    def learn(self, number: int, round_: Round) -> None:
        """Take in a round that is over."""
        if round_.proposed:
            self._move(number, 2 if round_.accepted == round_.acceptable else -1)


class Heuristic(HeuristicTransient):
    """`"heuristic"`: the same, and the next call with this target and drafter starts where this one ended."""

    lasts = True


class Adaptive(Schedule):
    """`"adaptive"`: for each row, one token more or fewer by the acceptance of its latest rounds.

    After every `WINDOW` rounds that drafted something: one more where the share of drafted tokens accepted is above
    the target by more than `MARGIN`, one fewer where it is below by more than that. Then counting begins anew, so a
    decision is judged by rounds that followed it.
    """

    def __init__(self, bounds: Bounds, rows: int) -> None:
        super().__init__(bounds, rows)
        self._windows: list[list[Round]] = [[] for _ in range(rows)]

    @property
    def maximum(self) -> int:
        """The most tokens that any round may draft."""
        return self._bounds.maximum

    def learn(self, number: int, round_: Round) -> None:
        """Take in a round that is over."""
        window = self._windows[number]
        if round_.proposed:
            window.append(round_)
        if len(window) < WINDOW:
            return
        rate = sum(past.accepted for past in window) / sum(past.acceptable for past in window)
        if rate > self._bounds.acceptance_target + MARGIN:
            self._move(number, 1)
        elif rate < self._bounds.acceptance_target - MARGIN:
            self._move(number, -1)
        window.clear()


_CLASSES: dict[str, type[Schedule]] = {
    "constant": Schedule,
    "heuristic": Heuristic,
    "heuristic_transient": HeuristicTransient,
    "adaptive": Adaptive,
}
#: Values of `num_assistant_tokens_schedule`.
SCHEDULES: Sequence[str] = tuple(_CLASSES)
_lasting: WeakKeyDictionary[Any, dict[tuple[Any, ...], int]] = WeakKeyDictionary()


def make_schedule(
    name: str | None, bounds: Bounds, rows: int, target: Any, drafter: tuple[Any, ...]
) -> tuple[Schedule, Callable[[], None]]:
    """The schedule of one call, and what to call when the call has ended well.

    Args:
        name: one of `SCHEDULES`; None = `"constant"`.
        bounds: limits and the first number of a first call.
        rows: rows B.
        target: the model, held weakly; with `drafter` (its identity) it names what a lasting schedule remembers.
    """
    kind = _CLASSES[name or "constant"]
    if not kind.lasts:
        return kind(bounds, rows), lambda: None
    memory, key = _lasting.setdefault(target, {}), (*drafter, bounds)
    start = memory.get(key, bounds.start)
    schedule = kind(Bounds(start, bounds.minimum, bounds.maximum, bounds.acceptance_target), rows)
    return schedule, lambda: memory.__setitem__(key, schedule.final)


def confident_lengths(confidence: Tensor, lengths: list[int], threshold: float) -> list[int]:
    """Cut each row's block at the first token whose confidence is below the threshold.

    Args:
        confidence: float32 [B, K] in [0, 1], the probability that token k survives given that the ones before do.
        lengths: drafted tokens of each row.
        threshold: in [0, 1]; 0 keeps all.

    Returns:
        The new lengths (0 = verify the anchor alone). Waits for the device once.
    """
    kept = (confidence >= threshold).long().cumprod(dim=1).sum(dim=1).tolist()
    return [min(own, length) for own, length in zip(kept, lengths, strict=True)]
