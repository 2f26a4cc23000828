"""The accept rule: pure tensor functions on distributions. Never sees a model.

One rule serves greedy decoding and sampling, since a greedy distribution is one-hot (speculative sampling, Leviathan et
al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318): keep a drafted token x with probability
min(1, p_target(x) / p_draft(x)), replace the first rejected one by a draw from normalise(max(p_target - p_draft, 0)),
and draw a bonus token from the target when all are kept. In a tree, the siblings below an accepted token are judged one
after the other, each against what the ones before it left of both distributions. All probabilities are float32; the
running sums that turn a uniform number into a token are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .proposal import Proposal, Verdict
from .tree import TokenTree


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        probs: float32 [B, V], non-negative; need not sum to one, but must not be all zero.
        uniforms: float64 [B] in [0, 1).

    Returns:
        LongTensor [B]; an entry of probability zero is never drawn.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # u < 1, but u * total may round up to total itself: stay below it, or the search would run off the end.
    points = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # right=True: the first entry whose cumulative sum exceeds the point, so flat (zero) entries are stepped over.
    return torch.searchsorted(cumulative, points, right=True).squeeze(-1).clamp_(max=probs.shape[-1] - 1)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """The distribution of a replacement token: max(p_target - p_draft, 0), not normalised.

    Args:
        target_probs: float32 [B, V].
        draft_probs: float32 [B, V]; all zero for a row without a rejected token, which leaves the target's own.

    Returns:
        float32 [B, V]. Where the mass is zero (both distributions equal up to rounding) the target's distribution:
        a rejection there has probability zero on paper and must still give a valid token.
    """
    rest = (target_probs - draft_probs).clamp_(min=0)
    empty = rest.sum(dim=-1, keepdim=True) <= 0
    return torch.where(empty, target_probs, rest)


def accepts(target_token_probs: Tensor, draft_token_probs: Tensor | None, uniforms: Tensor) -> Tensor:
    """Whether each drafted token passes on its own: u < p_target(x) / p_draft(x).

    Args:
        target_token_probs: float32, any shape: p_target of the drafted tokens.
        draft_token_probs: float32, same shape: p_draft of the drafted tokens; None = 1 (one-hot draft).
        uniforms: float64, same shape, in [0, 1).
    """
    bound = uniforms if draft_token_probs is None else uniforms * draft_token_probs
    return bound < target_token_probs


def draft_rows(proposal: Proposal, position: Tensor, rejected: Tensor, vocab_size: int) -> Tensor:
    """The draft's distribution at one position of each row, over the target's vocabulary.

    Args:
        proposal: K drafted tokens per row.
        position: LongTensor [B] in 0..K-1.
        rejected: bool [B]; rows where it is False get zeros.
        vocab_size: V.

    Returns:
        float32 [B, V].
    """
    rows = torch.arange(position.shape[0], device=position.device)
    full = torch.zeros(position.shape[0], vocab_size, device=position.device)
    if proposal.probs is None:
        full.scatter_(1, proposal.tokens[rows, position][:, None], 1.0)
    elif proposal.vocabulary is None:
        full = proposal.probs[rows, position].clone()
    else:
        full[:, proposal.vocabulary] = proposal.probs[rows, position]
    return full * rejected[:, None]


def verify_greedy(choices: Tensor, proposal: Proposal, tree: TokenTree | None = None) -> Verdict:
    """`verify_sampled` for one-hot target distributions, which reduce every step to a comparison.

    Args:
        choices: LongTensor [B, K + 1], the target's most likely token at each position.
        proposal: K drafted tokens per row.
        tree: how they stand to one another; None = a chain.
    """
    if tree is not None:
        return _greedy_tree(choices, proposal, tree)
    width = proposal.tokens.shape[1]
    agrees = (proposal.tokens == choices[:, :width]) & _proposed(proposal, choices.device)
    accepted = agrees.long().cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))


def verify_sampled(
    target_probs: Tensor, proposal: Proposal, uniforms: Tensor, tree: TokenTree | None = None
) -> Verdict:
    """Judge a whole block at once.

    Args:
        target_probs: float32 [B, K + 1, V], the target's processed distribution at each position.
        proposal: K drafted tokens per row.
        uniforms: float64 [B, K + 1] in [0, 1): one number a drafted token, the last for the token that follows.
        tree: how the tokens stand to one another; None = a chain.

    Returns:
        The accepted lengths and the tokens that follow them.
    """
    if tree is not None:
        return _sampled_tree(target_probs, proposal, tree, uniforms)
    batch, width = proposal.tokens.shape
    if width == 0:
        none = torch.zeros(batch, dtype=torch.long, device=target_probs.device)
        return Verdict(none, draw(target_probs[:, 0], uniforms[:, -1]))
    on_draft = target_probs[:, :width].gather(2, proposal.tokens[:, :, None]).squeeze(2)
    proposed = _proposed(proposal, target_probs.device)
    passed = accepts(on_draft, proposal.token_probs, uniforms[:, :width]) & proposed
    accepted = passed.long().cumprod(dim=1).sum(dim=1)
    rejected = accepted < proposed.sum(dim=1)
    draft = draft_rows(proposal, accepted.clamp(max=width - 1), rejected, target_probs.shape[-1])
    rows = torch.arange(batch, device=target_probs.device)
    return Verdict(accepted, draw(residual(target_probs[rows, accepted], draft), uniforms[:, -1]))


def verify_position(
    scores: Tensor, proposal: Proposal, place: int, uniforms: Tensor, do_sample: bool
) -> tuple[Tensor, Tensor]:
    """Judge one place of a block; judging all places in turn is the same rule as `verify_greedy`, `verify_sampled`.

    Args:
        scores: float32 [B, V], the target's processed scores at that place.
        proposal: the whole block.
        place: 0-based place in the block; a row that drafted no token there draws from the target.
        uniforms: float64 [B, 2]: one number to accept with, one for the token that follows otherwise.
        do_sample: False for one-hot distributions.

    Returns:
        (bool [B]: the drafted token was kept, LongTensor [B]: the token to commit).
    """
    device = scores.device
    drafted = torch.tensor([length > place for length in proposal.lengths], device=device)
    if not do_sample:
        tokens = scores.argmax(dim=-1)
        same = tokens == proposal.tokens[:, place] if place < proposal.tokens.shape[1] else drafted
        return same & drafted, tokens
    target_probs = scores.softmax(dim=-1)
    if place >= proposal.tokens.shape[1]:
        return drafted, draw(target_probs, uniforms[:, 1])
    tokens = proposal.tokens[:, place]
    on_draft = target_probs.gather(1, tokens[:, None]).squeeze(1)
    on_token = None if proposal.token_probs is None else proposal.token_probs[:, place]
    kept = accepts(on_draft, on_token, uniforms[:, 0]) & drafted
    draft = draft_rows(proposal, torch.full_like(tokens, place), drafted & ~kept, scores.shape[-1])
    return kept, torch.where(kept, tokens, draw(residual(target_probs, draft), uniforms[:, 1]))


def _greedy_tree(choices: Tensor, proposal: Proposal, tree: TokenTree) -> Verdict:
    """The longest path on which every node is the target's choice."""
    rows = torch.arange(choices.shape[0], device=choices.device)
    at, moving = torch.full_like(rows, -1), torch.ones_like(rows, dtype=torch.bool)
    path, proposed = [], _proposed(proposal, choices.device)
    for _ in range(tree.depth):
        matches = (tree.parents == at[:, None]) & (proposal.tokens == choices[rows, at + 1][:, None]) & proposed
        moving = moving & matches.any(dim=1)
        at = torch.where(moving, matches.long().argmax(dim=1), at)
        path.append(torch.where(moving, at, -1))
    nodes = torch.stack(path, dim=1) if path else proposal.tokens[:, :0]
    return Verdict((nodes >= 0).sum(dim=1), choices[rows, at + 1], nodes)


def _sampled_tree(target_probs: Tensor, proposal: Proposal, tree: TokenTree, uniforms: Tensor) -> Verdict:
    """Recursive rejection: `judge_siblings` at each node that is reached, from the anchor down.

    Sources: Miao et al., "SpecInfer", arXiv 2305.09781, algorithm 2; Yang et al., "Multi-candidate speculative
    decoding", arXiv 2401.06706; Jeon et al., "Recursive speculative decoding", arXiv 2402.14160.
    """
    rows = torch.arange(target_probs.shape[0], device=target_probs.device)
    at, moving = torch.full_like(rows, -1), torch.ones_like(rows, dtype=torch.bool)
    path, following = [], torch.zeros_like(rows)
    for level in range(tree.depth + 1):
        kept, nodes, tokens = judge_siblings(target_probs[rows, at + 1], proposal, tree, at, uniforms)
        following = torch.where(moving & ~kept, tokens, following)
        moving = moving & kept
        if level < tree.depth:
            at = torch.where(moving, nodes, at)
            path.append(torch.where(moving, nodes, -1))
    nodes = torch.stack(path, dim=1) if path else proposal.tokens[:, :0]
    return Verdict((nodes >= 0).sum(dim=1), following, nodes)


def judge_siblings(
    target_probs: Tensor, proposal: Proposal, tree: TokenTree, at: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Judge the children of one node of each row, in the order in which they were drawn.

    The first is judged as a chain's token is: by the target's distribution p and the draft's q. A rejected one leaves
    normalise(max(p - q, 0)) for p, and for q what is left without it, renormalised: exactly the distribution that the
    next sibling was drawn from. A sibling for which q has no mass left was chosen, not drawn, so q is one-hot there.

    Args:
        target_probs: float32 [B, V], the target's distribution behind that node.
        proposal: trees of N nodes.
        tree: their shape.
        at: LongTensor [B], the node whose children are judged, -1 = the anchor.
        uniforms: float64 [B, N + 1]: one number a node, the last for the token that follows otherwise.

    Returns:
        (bool [B]: a child was kept, LongTensor [B]: which node, LongTensor [B]: the token to commit).
    """
    rows = torch.arange(at.shape[0], device=at.device)
    kept, chosen = torch.zeros_like(at, dtype=torch.bool), torch.zeros_like(at)
    children = (tree.parents == at[:, None]) & _proposed(proposal, at.device)
    most = int(children.sum(dim=1).max()) if children.shape[1] else 0
    order = torch.argsort((~children).long(), dim=1, stable=True)[:, :most]  # the children first, in their order
    draft: Tensor | None = None
    for rank in range(most):
        nodes = order[:, rank]
        there = children[rows, nodes] & ~kept
        tokens = proposal.tokens[rows, nodes]
        if draft is None:
            draft = draft_rows(proposal, nodes, there, target_probs.shape[-1])
        mass = draft.sum(dim=-1, keepdim=True)
        onehot = torch.zeros_like(draft).scatter_(1, tokens[:, None], 1.0)
        drawn = (mass > 0) if proposal.probs is not None else torch.zeros_like(mass, dtype=torch.bool)
        now = torch.where(drawn, draft / mass.clamp(min=torch.finfo(draft.dtype).tiny), onehot)
        passed = accepts(target_probs[rows, tokens], now[rows, tokens], uniforms[rows, nodes]) & there
        kept, chosen = kept | passed, torch.where(passed, nodes, chosen)
        rest = residual(target_probs, now)
        rest = rest / rest.sum(dim=-1, keepdim=True)
        target_probs = torch.where((there & ~passed)[:, None], rest, target_probs)
        draft = draft.scatter(1, tokens[:, None], 0.0)
    following = draw(target_probs, uniforms[:, -1])
    return kept, chosen, torch.where(kept, proposal.tokens[rows, chosen] if most else following, following)


def verify_node(
    scores: Tensor, proposal: Proposal, tree: TokenTree, at: Tensor, uniforms: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Judge one step down the tree; all steps in turn are `verify_greedy` or `verify_sampled`.

    Args:
        scores: float32 [B, V], the target's processed scores behind node `at`.
        proposal, tree, at: as in `judge_siblings`.
        uniforms: float64 [B, N + 1]; None for one-hot distributions.

    Returns:
        As `judge_siblings`.
    """
    if uniforms is not None:
        return judge_siblings(scores.softmax(dim=-1), proposal, tree, at, uniforms)
    tokens = scores.argmax(dim=-1)
    if not proposal.tokens.shape[1]:
        return torch.zeros_like(at, dtype=torch.bool), at, tokens
    matches = (tree.parents == at[:, None]) & (proposal.tokens == tokens[:, None]) & _proposed(proposal, at.device)
    return matches.any(dim=1), matches.long().argmax(dim=1), tokens


def _proposed(proposal: Proposal, device: torch.device) -> Tensor:
    """bool [B, K]: True where a row really proposes a token."""
    width = proposal.tokens.shape[1]
    if all(length == width for length in proposal.lengths):
        return torch.ones(proposal.tokens.shape, dtype=torch.bool, device=device)
    lengths = torch.tensor(proposal.lengths, device=device)
    return torch.arange(width, device=device) < lengths[:, None]
