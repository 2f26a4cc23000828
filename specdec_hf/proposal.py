"""A step of decoding as values: a drafter's `Proposal` in, the accept rule's `Verdict` out.

Letters in the shapes: B rows, K drafted tokens, V the target's vocabulary, W the width of the draft distribution
(V, or the draft's own reduced vocabulary). Rank 0: knows neither models nor caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for one round.

    Args:
        tokens: LongTensor [B, K], the target's token ids. Entries at and beyond `lengths` are fillers.
        lengths: how many of the K tokens each row proposes, a list of B ints in 0..K.
        token_probs: float32 [B, K], the probability with which each token was drawn; None = 1 (a greedy draft is
            one-hot).
        probs: float32 [B, K, W], the distribution each token was drawn from, after every processor; None with a
            one-hot draft.
        vocabulary: LongTensor [W], the target id of each column of `probs`; None when W = V.
        confidence: float32 [B, K], the drafter's own estimate that token k survives given that the ones before it
            do; None when it has none.
    """

    tokens: Tensor
    lengths: list[int]
    token_probs: Tensor | None = None
    probs: Tensor | None = None
    vocabulary: Tensor | None = None
    confidence: Tensor | None = None

    @property
    def width(self) -> int:
        """The longest row's number of proposed tokens."""
        return max(self.lengths, default=0)

    def trimmed(self, lengths: list[int]) -> Proposal:
        """The same proposal cut to `lengths` (each at most the present one), tensors sliced to the new width."""
        width = max(lengths, default=0)
        cut = [None if t is None else t[:, :width] for t in (self.token_probs, self.probs, self.confidence)]
        return Proposal(self.tokens[:, :width], lengths, cut[0], cut[1], self.vocabulary, cut[2])


@dataclass(frozen=True)
class Verdict:
    """What the accept rule decides for one round.

    Args:
        accepted: LongTensor [B], drafted tokens kept (the longest accepted prefix).
        next_tokens: LongTensor [B], the token that follows them: the replacement of the first rejected token, or
            the bonus token when all were accepted.
    """

    accepted: Tensor
    next_tokens: Tensor


@dataclass(frozen=True)
class Round:
    """What one round did to one row: drafted tokens verified, drafted tokens accepted, tokens committed."""

    proposed: int
    accepted: int
    committed: int
