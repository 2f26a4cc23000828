"""A step of decoding as values: a drafter's `Proposal` in, the accept rule's `Verdict` out.

Letters in the shapes: B rows, K drafted tokens, V the target's vocabulary, W the width of the draft distribution
(V, or the draft's own reduced vocabulary). Rank 0: knows neither models nor caches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .tree import first_path


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
        parents: LongTensor [B, K], for a tree: the index of each token's parent among the K, -1 = child of the anchor.
            Parents stand before their children, siblings in the order in which they were drawn. None = a chain. In a
            tree, `probs` holds the distribution that the token's group of siblings was drawn from, without replacement
            (None = candidates that were chosen, not drawn), and `token_probs` is not read. May stand on the CPU, which
            saves a wait for the device.
    """

    tokens: Tensor
    lengths: list[int]
    token_probs: Tensor | None = None
    probs: Tensor | None = None
    vocabulary: Tensor | None = None
    confidence: Tensor | None = None
    parents: Tensor | None = None

    @property
    def width(self) -> int:
        """The longest row's number of proposed tokens."""
        return max(self.lengths, default=0)

    def trimmed(self, lengths: list[int]) -> Proposal:
        """The same proposal cut to `lengths` (each at most the present one), tensors sliced to the new width.

        What stays of a tree is a tree: parents stand before their children.
        """
        width = max(lengths, default=0)
        optional = (self.token_probs, self.probs, self.confidence, self.parents)
        cut = [None if t is None else t[:, :width] for t in optional]
        return Proposal(self.tokens[:, :width], lengths, cut[0], cut[1], self.vocabulary, cut[2], cut[3])

    def first_path(self) -> Proposal:
        """Of a tree, the chain of first children. Which nodes that are depends on no token, so it stays exact."""
        if self.parents is None:
            return self
        trees = zip(self.parents.tolist(), self.lengths, strict=True)
        chain = self._only([first_path(parents[:length]) for parents, length in trees])
        if self.probs is None:
            return replace(chain, parents=None)
        assert chain.probs is not None
        columns = chain.tokens
        if self.vocabulary is not None:
            columns = (self.vocabulary == columns[:, :, None]).long().argmax(dim=-1)
        return replace(chain, parents=None, token_probs=chain.probs.gather(2, columns[:, :, None]).squeeze(2))

    def no_deeper(self, depths: list[int]) -> Proposal:
        """Of a tree, the nodes of each row b that are at most `depths[b]` deep. This depends on no token either."""
        assert self.parents is not None
        nodes = []
        for parents, length, most in zip(self.parents.tolist(), self.lengths, depths, strict=True):
            own = [0] * length
            for node in range(length):
                own[node] = 1 + (own[parents[node]] if parents[node] >= 0 else 0)
            nodes.append([node for node in range(length) if own[node] <= most])
        return self if list(map(len, nodes)) == self.lengths else self._only(nodes)

    def _only(self, nodes: list[list[int]]) -> Proposal:
        """Of a tree, these nodes of each row, with all their ancestors among them."""
        assert self.parents is not None
        lengths, width = list(map(len, nodes)), max(map(len, nodes), default=0)
        host = self.parents.tolist()
        places = [{-1: -1, **{node: place for place, node in enumerate(own)}} for own in nodes]
        parents = [
            [at[host[row][node]] for node in own] for row, (at, own) in enumerate(zip(places, nodes, strict=True))
        ]
        fill = [[*own, *[0] * (width - len(own))] for own in nodes]
        index = torch.tensor(fill, dtype=torch.long, device=self.tokens.device).view(len(nodes), width)
        rows = torch.arange(len(nodes), device=index.device)[:, None]
        token_probs, probs, confidence = (
            None if t is None else t[rows, index] for t in (self.token_probs, self.probs, self.confidence)
        )
        above = torch.tensor([[*own, *[-1] * (width - len(own))] for own in parents], dtype=torch.long)
        above = above.view(len(nodes), width)
        return Proposal(self.tokens[rows, index], lengths, token_probs, probs, self.vocabulary, confidence, above)


@dataclass(frozen=True)
class Verdict:
    """What the accept rule decides for one round.

    Args:
        accepted: LongTensor [B], drafted tokens kept (the longest accepted prefix).
        next_tokens: LongTensor [B], the token that follows them: the replacement of the first rejected token, or
            the bonus token when all were accepted.
        path: LongTensor [B, depth], of a tree: the accepted nodes from the top down, then fillers. None = a chain.
    """

    accepted: Tensor
    next_tokens: Tensor
    path: Tensor | None = None


@dataclass(frozen=True)
class Round:
    """What one round did to one row: drafted tokens verified, drafted tokens accepted, tokens committed.

    `depth` is how many of the verified tokens could be accepted at most: the depth of a tree; None = all, a chain.
    """

    proposed: int
    accepted: int
    committed: int
    depth: int | None = None

    @property
    def acceptable(self) -> int:
        """How many of the verified tokens could be accepted at most."""
        return self.proposed if self.depth is None else self.depth
