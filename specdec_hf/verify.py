"""The accept rule: pure tensor functions on distributions. Never sees a model.

One rule serves greedy decoding and sampling, since a greedy distribution is one-hot (speculative sampling, Leviathan et
al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318): keep a drafted token x with probability
min(1, p_target(x) / p_draft(x)), replace the first rejected one by a draw from normalise(max(p_target - p_draft, 0)),
and draw a bonus token from the target when all are kept. All probabilities are float32; the running sums that turn a
uniform number into a token are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .proposal import Proposal, Verdict


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


def verify_greedy(choices: Tensor, proposal: Proposal) -> Verdict:
    """`verify_sampled` for one-hot target distributions, which reduce every step to a comparison.

    Args:
        choices: LongTensor [B, K + 1], the target's most likely token at each position.
        proposal: K drafted tokens per row.
    """
    width = proposal.tokens.shape[1]
    agrees = (proposal.tokens == choices[:, :width]) & _proposed(proposal, choices.device)
    accepted = agrees.long().cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))


def verify_sampled(target_probs: Tensor, proposal: Proposal, uniforms: Tensor) -> Verdict:
    """Judge a whole block at once.

    Args:
        target_probs: float32 [B, K + 1, V], the target's processed distribution at each position.
        proposal: K drafted tokens per row.
        uniforms: float64 [B, K + 1] in [0, 1): one number a drafted token, the last for the token that follows.

    Returns:
        The accepted lengths and the tokens that follow them.
    """
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


def _proposed(proposal: Proposal, device: torch.device) -> Tensor:
    """bool [B, K]: True where a row really proposes a token."""
    width = proposal.tokens.shape[1]
    if all(length == width for length in proposal.lengths):
        return torch.ones(proposal.tokens.shape, dtype=torch.bool, device=device)
    lengths = torch.tensor(proposal.lengths, device=device)
    return torch.arange(width, device=device) < lengths[:, None]
