"""The training objective of a DSpark head: anchors, labels and the three losses. Tensor functions, no model.

Source: DSpark paper, training section, and the loss values of DeepSpec that tests/golden holds. Letters: B sequences,
T tokens, A anchors a sequence, K block size, N supervised slots of a batch, D and Dt hidden sizes of draft and target,
r Markov rank, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three losses and the decay over the slots of a block.

    Attributes:
        ce: factor of the cross entropy with the true next token.
        tv: factor of ``sum |p_d - p_t|`` (twice the total variation distance, 0 to 2, as the reference writes it).
        confidence: factor of the binary cross entropy of the confidence head.
        decay: w in the slot weight ``exp(-(k - 1) / w)``; the released configurations use 4.0 for 7 slots.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or not value >= 0 or (field.name == "decay" and value == 0):
                raise ValueError(
                    f"{field.name}={value!r}: loss weights are non-negative numbers and decay is positive; correct it"
                )


class Blocks(NamedTuple):
    """Where the blocks of a batch are and what they must predict.

    Attributes:
        anchors: [B, A] int64, position of each block's anchor (0 where there is none).
        keep: [B, A] bool, whether the block exists.
        previous: [B, A, K] int64, the true token before the predicted one (x_{k-1}; teacher forcing).
        labels: [B, A, K] int64, the true next tokens.
        valid: [B, A, K] bool, whether the slot is supervised.
        sources: [B, A, K] int64, positions whose target hidden state predicts the label (label position - 1).
    """

    anchors: torch.Tensor
    keep: torch.Tensor
    previous: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor
    sources: torch.Tensor


class Losses(NamedTuple):
    """Weighted means over the supervised slots: scalars, ``total`` with its gradient, the others for reports.

    ``acceptance`` [K] is the mean of ``1 - TV`` a slot, the expected acceptance given that the slot was reached.
    """

    total: torch.Tensor
    ce: torch.Tensor
    tv: torch.Tensor
    confidence: torch.Tensor
    acceptance: torch.Tensor


def draw_anchors(
    loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to ``num_anchors`` different positions a row whose token and whose successor are supervised.

    Args:
        loss_mask: [B, T], non-zero where a token is supervised.
        num_anchors: A.
        generator: makes the draw repeatable.

    Returns:
        Ascending anchors [B, A] int64 (0 where the row has fewer) and whether each exists [B, A] bool.

    Raises:
        ValueError: no row has two supervised tokens in sequence, so nothing can be learned from the batch.
    """
    mask = loss_mask != 0
    possible = torch.zeros_like(mask)
    possible[:, :-1] = mask[:, :-1] & mask[:, 1:]
    if not bool(possible.any()):
        raise ValueError(
            f"no anchor in a batch of {mask.shape[0]} sequences: no two supervised tokens meet. Check the loss mask."
        )
    scores = torch.rand(mask.shape, generator=generator).to(mask.device).masked_fill(~possible, -1.0)
    best = scores.topk(min(num_anchors, mask.shape[1]), dim=1)
    keep = best.values >= 0
    order = torch.where(keep, best.indices, mask.shape[1]).sort(dim=1).values
    keep = order < mask.shape[1]
    return torch.where(keep, order, 0), keep


def make_blocks(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, anchors: torch.Tensor, keep: torch.Tensor, block_size: int
) -> Blocks:
    """Labels of the blocks: the next K tokens, supervised while inside the sequence and while the mask is contiguous.

    Args:
        input_ids, loss_mask: [B, T].
        anchors, keep: [B, A], from :func:`draw_anchors`.
        block_size: K.
    """
    rows, length = input_ids.shape
    places = anchors[..., None] + torch.arange(block_size + 1, device=anchors.device)
    inside = places < length
    flat = places.clamp(max=length - 1).view(rows, -1)
    tokens = input_ids.gather(1, flat).view(places.shape)
    supervised = (loss_mask.gather(1, flat).view(places.shape) != 0) & inside
    valid = supervised[..., 1:].long().cumprod(dim=-1).bool() & keep[..., None]
    return Blocks(anchors, keep, tokens[..., :-1], tokens[..., 1:], valid, flat.view(places.shape)[..., :-1])


def slot_weights(valid: torch.Tensor, decay: float) -> torch.Tensor:
    """``exp(-(k - 1) / decay)`` where a slot is supervised, else 0: [B, A, K] float32."""
    slots = torch.arange(valid.shape[-1], device=valid.device, dtype=torch.float32)
    return torch.exp(-slots / decay) * valid


def slot_losses(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    target_log_mass: torch.Tensor | None,
    labels: torch.Tensor,
    confidence: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three losses of N slots, float32, unweighted.

    Args:
        draft_logits: [N, Vd].
        target_logits: [N, Vd], the target's logits at the draft's ids.
        target_log_mass: [N] log-sum-exp of the target's logits over the whole of V; ``None`` when Vd is V.
        labels: [N] draft ids, -1 where the true token is not among them (no cross entropy there).
        confidence: [N] confidence logits, or ``None`` without that head.

    Returns:
        Cross entropy, ``sum |p_d - p_t|`` (the target's mass outside of the draft's ids counts in full) and the
        confidence loss against ``1 - 0.5 * sum |p_d - p_t|``, each [N].
    """
    log_draft = draft_logits.float().log_softmax(dim=-1)
    target_logits = target_logits.float()
    if target_log_mass is None:
        target_probs = target_logits.softmax(dim=-1)
        outside = torch.zeros((), device=labels.device)
    else:
        target_probs = (target_logits - target_log_mass.float()[:, None]).exp()
        outside = (1.0 - target_probs.sum(dim=-1)).clamp(min=0.0)
    distance = (log_draft.exp() - target_probs).abs().sum(dim=-1) + outside
    picked = log_draft.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    ce = torch.where(labels >= 0, -picked, torch.zeros_like(picked))
    if confidence is None:
        return ce, distance, torch.zeros_like(ce)
    # Soft labels are detached, and BCE from logits has a gradient of at most 1 a slot: a sure head that is wrong once
    # costs much but never pushes much.
    survival = (1.0 - 0.5 * distance.detach()).clamp(0.0, 1.0)
    return ce, distance, F.binary_cross_entropy_with_logits(confidence.float(), survival, reduction="none")


Projection = Callable[..., torch.Tensor]


def chunked_losses(
    draft_features: tuple[torch.Tensor, ...],
    target_hidden: torch.Tensor,
    target_log_mass: torch.Tensor | None,
    labels: torch.Tensor,
    slot_confidence: torch.Tensor | None,
    draft_projection: Projection,
    target_projection: Projection,
    chunk: int | None = 1024,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`slot_losses` over the vocabulary in chunks of slots; each chunk is computed again in the backward pass.

    So at most ``chunk`` rows of logits are alive at a time, whatever N is.

    Args:
        draft_features: tensors [N, ...] that ``draft_projection`` turns into draft logits [n, Vd].
        target_hidden: [N, Dt] last hidden states of the target (after its final norm).
        target_log_mass: [N] or ``None``, see :func:`slot_losses`.
        labels: [N] draft ids or -1.
        slot_confidence: [N] or ``None``.
        draft_projection, target_projection: functions of a chunk; the target's is called without gradient.
        chunk: slots at a time; ``None``: all at once, and nothing is computed again (more memory, less time).
    """
    size = labels.shape[0] if chunk is None else chunk
    if labels.shape[0] and size < 1:
        raise ValueError(f"chunk={chunk}: at least one slot at a time is needed; raise it")

    def piece(start: int, *features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        part = slice(start, start + size)
        with torch.no_grad():
            target_logits = target_projection(target_hidden[part])
            mass = None if target_log_mass is None else target_log_mass[part]
        confidence = None if slot_confidence is None else slot_confidence[part]
        return slot_losses(draft_projection(*features), target_logits, mass, labels[part], confidence)

    if chunk is None:
        return piece(0, *draft_features)
    parts = []
    for start in range(0, labels.shape[0], size):
        features = tuple(feature[start : start + size] for feature in draft_features)
        parts.append(checkpoint(piece, start, *features, use_reentrant=False, preserve_rng_state=False))
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))  # type: ignore[return-value]


def combine(
    ce: torch.Tensor,
    distance: torch.Tensor,
    confidence: torch.Tensor,
    valid: torch.Tensor,
    weights: LossWeights,
    normaliser: torch.Tensor | None = None,
) -> Losses:
    """Weighted mean of the slot losses: ``sum(w * loss) / sum(w)`` for each, then the weighted sum of the three.

    Args:
        ce, distance, confidence: [N], the supervised slots in the order of ``valid``.
        valid: [B, A, K] bool with N true entries.
        weights: factors and decay.
        normaliser: sum of w over the *global* batch if this is a part of it (several processes, accumulation).
    """
    slots = slot_weights(valid, weights.decay)[valid]
    norm = slots.sum() if normaliser is None else normaliser
    means = [(slots * loss).sum() / norm for loss in (ce, distance, confidence)]
    total = weights.ce * means[0] + weights.tv * means[1] + weights.confidence * means[2]
    with torch.no_grad():
        full = torch.zeros(valid.shape, device=valid.device)
        full[valid] = 1.0 - 0.5 * distance.detach()
        acceptance = full.sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
    return Losses(total, means[0].detach(), means[1].detach(), means[2].detach(), acceptance)
