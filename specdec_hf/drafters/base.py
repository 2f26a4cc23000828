"""What the decoding loop asks of a drafter, and what it tells it. One file in this folder is one strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..early import EarlyLayers
from ..options import SpeculativeConfig
from ..processors import DraftSampler
from ..proposal import Proposal


@dataclass(frozen=True)
class Prompt:
    """What a drafter learns once, after the target's prefill.

    Args:
        ids: LongTensor [B, L], the prompt as `generate` got it (cached turns included if they were passed).
        taps: per target layer id, hidden states [B, T, Dt] of the T columns that were prefilled now.
        positions: LongTensor [B, T], rotary positions of those columns.
        valid: bool [B, T], False at padding; None = no padding.
        cached: per row, valid tokens that the target's cache held before (earlier turns).
        capacity: tokens a row can hold at most when the call ends.
        state: what `Drafter.state` returned at the end of the call that filled the cache, or None.
        mask: bool [B, C], True at text, over all columns that the target's cache now holds (those it held before, then
            the T new ones); None = no padding.
    """

    ids: Tensor
    taps: list[Tensor]
    positions: Tensor
    valid: Tensor | None
    cached: list[int]
    capacity: int
    state: Any
    mask: Tensor | None = None


@dataclass(frozen=True)
class DraftRequest:
    """One round's order.

    Args:
        anchors: LongTensor [B], the last committed token of each row, not yet in the target's cache.
        positions: LongTensor [B], the anchors' rotary positions.
        limits: tokens that each row may propose.
        width: the largest limit (at least 1).
        sampler: draws the tokens and keeps their distributions.
        ids: LongTensor [B, capacity], the text: prompt (padding included), committed tokens, the anchor, and behind it
            what the sampler has drawn in this round so far. Not to be written to.
        lengths: per row, tokens of `ids` up to and including the anchor.
        early: the target's first `Drafter.early_layers` layers; None where the drafter has none.
    """

    anchors: Tensor
    positions: Tensor
    limits: list[int]
    width: int
    sampler: DraftSampler
    ids: Tensor
    lengths: list[int]
    early: EarlyLayers | None = None


@dataclass(frozen=True)
class Observation:
    """What the target's forward showed about the tokens that were committed.

    Args:
        taps: per target layer id, hidden states [B, S, Dt] of the block (the anchor first).
        positions: LongTensor [B, S].
        tokens: LongTensor [B, S], the block's input tokens.
        counts: per row, how many of the S columns were committed.
    """

    taps: list[Tensor]
    positions: Tensor
    tokens: Tensor
    counts: list[int]


class TokenConfidence:
    """For drafters that go token by token: the probability of the most likely token, where a threshold asks for it.

    Args:
        threshold: below it a row's draft is cut; 0 = nothing is computed.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold, self._scores = threshold, list[Tensor]()

    def falls_short(self, logits: Tensor, device: torch.device) -> bool:
        """Take in the logits [B, W] of one more token; whether every row is cut here, so that drafting may end."""
        if not self._threshold:
            return False
        self._scores.append(logits.float().softmax(dim=-1).amax(dim=-1).to(device))
        return bool((self._scores[-1] < self._threshold).all())

    @property
    def scores(self) -> Tensor | None:
        """float32 [B, K], as `Proposal.confidence`."""
        return torch.stack(self._scores, dim=1) if self._scores else None


class Drafter(ABC):
    """Proposes tokens. Holds the state of one `generate()` call.

    Attributes:
        name: the strategy's name, which is the file's name.
        target_layer_ids: decoder layers whose hidden states it needs (0-based, -1 = embedding output).
        max_tokens: most tokens it can propose in one round.
        default_tokens: tokens that it proposes in a round if the user says nothing; None = `max_tokens`.
        level_rows: True if all rows of a batch must stay at one length.
        max_depth: for a drafter of trees (`Proposal.parents`), whose `limits` and `max_tokens` count nodes: depth of
            the deepest; None = it drafts chains. Where the target cannot verify trees (attention without dense masks,
            ALiBi, `output_attentions`), the loop keeps the chain of first children; nodes deeper than the text may
            still become are cut by it too.
        draws: random numbers that a row's draft takes when sampling, whatever its limit; None = one a drafted token.
        early_layers: how many of the target's first layers it drafts with, through `DraftRequest.early`; None = it does
            not use them.
    """

    name: ClassVar[str]
    target_layer_ids: list[int]
    max_tokens: int
    default_tokens: int | None = None
    level_rows: bool = False
    max_depth: int | None = None
    draws: int | None = None
    early_layers: int | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two drafters that can continue from each other's `state`."""
        return (self.name,)

    @classmethod
    @abstractmethod
    def create(cls, head: Any, target: Any, config: SpeculativeConfig) -> Drafter:
        """A drafter for one call; checks that head and target fit, with an error that says what to do."""

    @abstractmethod
    def start(self, prompt: Prompt) -> None:
        """Take in the prompt."""

    @abstractmethod
    def propose(self, request: DraftRequest) -> Proposal:
        """Draft one block."""

    @abstractmethod
    def observe(self, observation: Observation) -> None:
        """Take in committed tokens."""

    @abstractmethod
    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows of the batch, in that order."""

    def complaint(self) -> str | None:
        """What made this call's drafts useless, in words, and what to do; None = nothing. Asked once, at the end."""
        return None

    def park(self, rows: dict[int, int]) -> None:  # noqa: B027 - nothing to keep is a valid answer
        """Keep the state of rows that are about to leave, for `state`: {row's number in the call: present row}."""

    def state(self, numbers: list[int]) -> Any:
        """What a later turn with the same cache should get as `Prompt.state`; None = nothing.

        Args:
            numbers: the call's row number of each row still in the batch.
        """
        return None
