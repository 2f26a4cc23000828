"""How much one call drafts and verifies, round by round: schedule, confidence, price, and whether it drafts at all.

Brings together what `policies` decides and what `costs` measured; the loop asks here and reports what came of it.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from .costs import CostTable, cost_table
from .options import SpeculativeConfig
from .output import SpeculationStats
from .policies import (
    AcceptanceRates,
    AutomaticOff,
    Bounds,
    RowPaces,
    admitted_lengths,
    confident_lengths,
    make_schedule,
)
from .proposal import Proposal, Round
from .targets import decoder_layers

if TYPE_CHECKING:
    from .drafters.base import Drafter

#: Rounds whose drafting is timed before its price is known; the first of them warms up.
_TIMED = 4


class Pace:
    """The pace of one call.

    Args:
        config: what the user said.
        drafter: the call's drafter.
        target: the model; measured here, once, if the price of a block matters.
        rows: rows B of the call.
        stats: rounds without a draft are counted there.
    """

    def __init__(
        self, config: SpeculativeConfig, drafter: Drafter, target: Any, rows: int, stats: SpeculationStats
    ) -> None:
        self._config, self._drafter, self._rows, self._stats = config, drafter, rows, stats
        most = min(config.max_assistant_tokens or drafter.max_tokens, drafter.max_tokens)
        least = min(config.min_assistant_tokens or 1, most)
        first = config.num_assistant_tokens or drafter.default_tokens or drafter.max_tokens
        bounds = Bounds(min(max(first, least), most), least, most, config.acceptance_target)
        name = config.num_assistant_tokens_schedule
        self._schedule, self.finish = make_schedule(name, bounds, rows, target, drafter.identity)
        self.block_size = self._schedule.maximum
        self._weighs = name == "throughput"
        self._rates = AcceptanceRates()
        self._switch = AutomaticOff(rows) if config.switches_off else None
        self._paces = RowPaces(rows)
        self._costs: CostTable | None = None
        if self._weighs or self._switch is not None:
            widths = sorted({1, 2, (self.block_size + 3) // 2, self.block_size + 1})
            self._costs = cost_table(target, [rows * width for width in widths], rows)
        self._draft_name = f"{drafter.name} {type(drafter).__name__} {self.block_size} {rows}"
        self._draft_times: list[float] = []
        self._until = (0.0, 0.0)  # seconds of drafting and of the target before this round
        early = drafter.early_layers or 0
        #: What of the target runs after the draft: early exit has run its first layers by then.
        self._rest = 1.0 - early / len(decoder_layers(target)) if early else 1.0

    def limits(self, numbers: list[int], budgets: list[int], ended: list[bool]) -> list[int]:
        """Tokens that each present row may draft: the schedule's number, within its budget.

        A tree may have more nodes than the budget has tokens, but not be deeper.

        Args:
            numbers: the rows' numbers in the call.
            budgets: tokens that may still follow each row's text, less the one that the target adds.
            ended: which rows are done.
        """
        if self._switch is not None and self._switch.off:
            return [0] * len(numbers)
        wishes = self._schedule.limits(numbers)
        rooms = [0 if done else budget for budget, done in zip(budgets, ended, strict=True)]
        if self._drafter.max_depth is not None:
            return [wish if room else 0 for wish, room in zip(wishes, rooms, strict=True)]
        return [min(wish, room) for wish, room in zip(wishes, rooms, strict=True)]

    def trimmed(self, proposal: Proposal) -> Proposal:
        """What of a proposal to verify."""
        threshold, lengths = self._config.confidence_threshold, proposal.lengths
        if self._weighs:
            lengths = admitted_lengths(self._survival(proposal), self._seconds, padded=True)
        elif threshold > 0 and proposal.confidence is not None:
            lengths = confident_lengths(proposal.confidence, lengths, threshold)
        if max(lengths) < proposal.tokens.shape[1] or lengths is not proposal.lengths:
            return proposal.trimmed(lengths)
        return proposal

    def _survival(self, proposal: Proposal) -> list[list[float]]:
        if proposal.confidence is None:
            chances = self._rates.survival(proposal.width)
            return [chances[:length] for length in proposal.lengths]
        # A tree's node has its own chance to be reached and kept; of a chain's token it is that of the whole prefix.
        own = proposal.confidence.nan_to_num(0.0)
        whole = own if proposal.parents is not None else own.cumprod(dim=1)
        return [row[:length] for row, length in zip(whole.tolist(), proposal.lengths, strict=True)]

    def _seconds(self, tokens: int) -> float:
        assert self._costs is not None
        return self._rest * self._costs.target(tokens) + self._costs.drafts.get(self._draft_name, 0.0)

    def learn(self, number: int, round_: Round) -> None:
        """Take in one row's round."""
        self._schedule.learn(number, round_)
        if self._weighs:
            self._rates.learn(round_)

    def end_round(self, rows: int, drafted: int, width: int, gained: dict[int, int]) -> None:
        """Take in a round of the whole batch.

        Args:
            rows: rows of the forward.
            drafted: tokens that the longest row drafted.
            width: tokens of the longest row that were verified.
            gained: by its number in the call, the tokens that each row gained that had not ended before.
        """
        if self._costs is None:
            return
        drafting, verifying = (now - then for now, then in zip(self._clock(), self._until, strict=True))
        self._until = self._clock()
        if drafted and self._draft_name not in self._costs.drafts:
            # By the target's clock of the same round, for the table may be of a busier hour.
            self._draft_times.append(drafting / verifying * self._rest * self._costs.target(rows * (width + 1)))
            if len(self._draft_times) == _TIMED:
                self._costs.drafts[self._draft_name] = statistics.median(self._draft_times[1:])
                self._costs.save()
        if self._switch is None:
            return
        if self._switch.off:
            self._stats.paused_rounds += 1
        if self._switch.off or not drafted or not gained:
            self._switch.learn(1.0, 1.0)
            return
        self._paces.learn(gained)
        even = self._paces.evenness(list(gained), lambda left: self._seconds(left * (width + 1)))
        cost = self._seconds(rows * (width + 1)) / self._costs.target(rows)
        self._switch.learn(even * sum(gained.values()) / len(gained), cost)

    def prefilled(self) -> None:
        """Drafting begins now: what `start` of the drafter took is no round's."""
        self._until = self._clock()

    def _clock(self) -> tuple[float, float]:
        return self._stats.seconds["draft"], self._stats.seconds["target"]
