"""How much to draft and how much of it to verify.

A policy decides from what is known *before* a token is drawn: a schedule sees rounds that are over, and the confidence
of token k depends on the tokens before it and never on token k itself (reference: DSpark, section on
confidence-scheduled verification). So shortening a block leaves the output distribution exactly the target's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .proposal import Round

if TYPE_CHECKING:
    from torch import Tensor

#: Rounds of a row over which `Adaptive` counts before it decides.
WINDOW = 4
#: What `"confidence"` cuts below where no threshold is given; transformers' own default for its assistants.
CONFIDENCE = 0.4
#: How far the acceptance must lie from the target before `Adaptive` moves.
MARGIN = 0.1
#: What `fitting_tokens` takes for the chance that a drafted token is accepted, and the most that it answers.
_ACCEPTANCE, _LONGEST = 0.7, 5


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
    "confidence": Schedule,
    "throughput": Schedule,
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


def fitting_tokens(price: float) -> int:
    """Tokens to draft in a round by a draft whose step costs `price` steps of its target, if nothing else is known.

    The K with the most tokens a second where each token is accepted with the same chance (Leviathan et al. 2023,
    section 3.4): 5 for a draft of a twentieth of the target's weights, 4 of a tenth, 2 of a quarter, 1 from a half.
    """

    def pace(tokens: int) -> float:
        return (1 - _ACCEPTANCE ** (tokens + 1)) / (1 + price * tokens)

    return max(range(1, _LONGEST + 1), key=pace)


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


class AcceptanceRates:
    """How often the token at each place survived in this call, for drafters without a confidence of their own."""

    def __init__(self) -> None:
        self._kept: list[int] = []
        self._reached: list[int] = []

    def learn(self, round_: Round) -> None:
        """Take in a round that is over."""
        grow = round_.acceptable - len(self._kept)
        self._kept += [0] * grow
        self._reached += [0] * grow
        for place in range(min(round_.accepted + 1, round_.acceptable)):
            self._reached[place] += 1
            self._kept[place] += place < round_.accepted

    def survival(self, places: int) -> list[float]:
        """The chance that the token at each place is accepted: the product of the rates up to there.

        A rate is (kept + 1) / (reached + 2), so 1/2 before anything is known.
        """
        chances, chance = [], 1.0
        for place in range(places):
            kept, reached = (self._kept[place], self._reached[place]) if place < len(self._kept) else (0, 0)
            chance *= (kept + 1) / (reached + 2)
            chances.append(chance)
        return chances


def admitted_lengths(survival: list[list[float]], seconds: Callable[[int], float], padded: bool = False) -> list[int]:
    """How many drafted tokens of each row to verify, so that the batch commits the most tokens a second.

    Algorithm 1 of DSpark: tokens are admitted in the order of their chance to survive, over all rows, for as long as
    each of them raises (expected tokens) / (seconds of the round), and the first that does not ends it. That end is
    what keeps decoding lossless: whether the token at place j is verified depends on the chances up to j alone, and
    these on the tokens before j. A search beyond a drop would let the next chance, which depends on the token at j,
    decide about that token.

    Args:
        survival: per row, the chance that its tokens up to place j are all accepted, descending in j.
        seconds: of a round with so many tokens in the target's forward, the rows' anchors counted. Must not depend on
            the drafted tokens.
        padded: rows of the forward are as long as the longest, as in this package's loop. Then a place is admitted for
            all rows at once, by the sum of their chances there: once one row has it, the others have it for nothing.

    Returns:
        The length of each row.
    """
    if padded:
        return _admitted_columns(survival, seconds)
    lengths, tokens, expected = [0] * len(survival), len(survival), float(len(survival))
    best = expected / seconds(tokens)
    waiting = [(-chances[0], 0, row) for row, chances in enumerate(survival) if chances]
    heapq.heapify(waiting)
    while waiting:
        chance, place, row = heapq.heappop(waiting)
        tokens, expected = tokens + 1, expected - chance
        if expected / seconds(tokens) <= best:
            break
        best, lengths[row] = expected / seconds(tokens), place + 1
        if place + 1 < len(survival[row]):
            following = min(survival[row][place + 1], -chance)
            heapq.heappush(waiting, (-following, place + 1, row))
    return lengths


def _admitted_columns(survival: list[list[float]], seconds: Callable[[int], float]) -> list[int]:
    rows = len(survival)
    width, expected, best = 0, float(rows), rows / seconds(rows)
    while gain := sum(chances[width] for chances in survival if len(chances) > width):
        expected += gain
        if expected / seconds(rows * (width + 2)) <= best:
            break
        width += 1
        best = expected / seconds(rows * (width + 1))
    return [min(width, len(chances)) for chances in survival]


class RowPaces:
    """How evenly the rows of a batch gain: a batch is done when its slowest row is.

    Args:
        rows: rows B of the call.
    """

    #: What a round still counts after the next one, and rounds of the batch's mean that each row begins with.
    FADES, BELIEVED = 0.9, 6.0

    def __init__(self, rows: int) -> None:
        self._gained, self._rounds = [0.0] * rows, [0.0] * rows

    def learn(self, gained: Mapping[int, int]) -> None:
        """Take in a round that drafted: tokens that each row gained, by the row's number in the call."""
        for number, tokens in gained.items():
            self._gained[number] = self.FADES * self._gained[number] + tokens
            self._rounds[number] = self.FADES * self._rounds[number] + 1.0

    def evenness(self, numbers: Sequence[int], seconds: Callable[[int], float]) -> float:
        """What of the rows' mean gain shortens the batch's time to its end, in (0, 1]; 1 for a single row.

        Rows with the same number of tokens to go leave the batch in the order of their pace, and a round then costs
        what a round of the rows that are left costs.

        Args:
            numbers: the rows still decoding, each with a round behind it.
            seconds: of a round of so many rows.
        """
        gained, rounds = ([values[number] for number in numbers] for values in (self._gained, self._rounds))
        mean = sum(gained) / sum(rounds)
        paces = sorted(
            ((own + self.BELIEVED * mean) / (count + self.BELIEVED) for own, count in zip(gained, rounds, strict=True)),
            reverse=True,
        )
        spent, until = 0.0, 0.0  # until each row's end, per token to go: seconds, and rounds
        for left, pace in zip(range(len(paces), 0, -1), paces, strict=True):
            spent, until = spent + (1 / pace - until) * seconds(left), 1 / pace
        return min(seconds(len(paces)) / (spent * mean), 1.0)


class AutomaticOff:
    """Stops drafting while it costs more than it gains, and tries again later. Counts in plain steps of the batch.

    After each round, what it cost beyond what it gained is added to a loss, which never falls below 0: so text that
    gains keeps a small loss whatever its single rounds do. Beyond `PATIENCE` the next `PAUSE` rounds are plain; then
    drafting is tried with less patience, and each pause that follows a failed try is twice as long, up to `LONGEST`.
    A try that has gained as much as it lost over `TRIED` rounds ends the mistrust. The mean of many rows says more than
    one row's gain, so patience shrinks with the root of their number.

    Args:
        rows: rows B of the call.
    """

    PATIENCE, RETRIED, PAUSE, LONGEST, TRIED = 2.0, 0.7, 16, 256, 8

    def __init__(self, rows: int = 1) -> None:
        self._scale = rows**-0.5
        self._loss, self._patience = 0.0, self.PATIENCE * self._scale
        self._pause, self._left, self._rounds = self.PAUSE, 0, 0

    @property
    def off(self) -> bool:
        """Whether the next round is to be plain."""
        return self._left > 0

    def learn(self, gained: float, cost: float) -> None:
        """Take in a round that is over: mean tokens per row, and its cost in plain steps."""
        if self.off:
            self._left -= 1
            return
        self._rounds += 1
        self._loss = max(self._loss + cost - gained, 0.0)
        if self._loss > self._patience:
            self._left, self._pause = self._pause, min(2 * self._pause, self.LONGEST)
            self._loss, self._patience, self._rounds = 0.0, self.RETRIED * self._scale, 0
        elif self._rounds >= self.TRIED and self._loss == 0.0:
            self._patience, self._pause = self.PATIENCE * self._scale, self.PAUSE
