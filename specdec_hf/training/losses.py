"""The training objective of a DSpark head: anchors, labels and the three losses. Tensor functions, no model.

Source: DSpark paper, training section, and the loss values of DeepSpec that tests/golden holds. Letters: B sequences,
T tokens, A anchors a sequence, K block size, N supervised slots of a batch. A row may hold several texts, one after
another (packed); ``segments`` [B, T] numbers them from 1, and 0 is padding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F


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
        anchors: [B, A] int64, place of each block's anchor in its row (0 where there is none).
        keep: [B, A] bool, whether the block exists.
        starts: [B, A] int64, place of the first token of the anchor's text: no block sees what is before it.
        previous: [B, A, K] int64, the true token before the predicted one (x_{k-1}; teacher forcing).
        labels: [B, A, K] int64, the true next tokens.
        valid: [B, A, K] bool, whether the slot is supervised.
        sources: [B, A, K] int64, places whose target hidden state predicts the label (the label's place - 1).
    """

    anchors: torch.Tensor
    keep: torch.Tensor
    starts: torch.Tensor
    previous: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor
    sources: torch.Tensor

    def flat_sources(self, length: int) -> torch.Tensor:
        """``sources`` in the flattened batch [B * T] of rows of ``length`` tokens."""
        rows = torch.arange(len(self.sources), device=self.sources.device)
        return self.sources + rows[:, None, None] * length


class Losses(NamedTuple):
    """Weighted means over the supervised slots: scalars, ``total`` with its gradient, the others for reports.

    ``acceptance`` [K] is the mean of ``1 - TV`` a slot, the expected acceptance given that the slot was reached.
    """

    total: torch.Tensor
    ce: torch.Tensor
    tv: torch.Tensor
    confidence: torch.Tensor
    acceptance: torch.Tensor


def anchor_places(loss_mask: torch.Tensor) -> torch.Tensor:
    """[B, T] bool: places whose token and whose successor are supervised; only these can be anchors."""
    mask = loss_mask != 0
    possible = torch.zeros_like(mask)
    possible[..., :-1] = mask[..., :-1] & mask[..., 1:]
    return possible


def draw_anchors(
    loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to ``num_anchors`` different places a row whose token and whose successor are supervised.

    Args:
        loss_mask: [B, T] of rows with one text each, non-zero where a token is supervised.
        num_anchors: A.
        generator: makes the draw repeatable.

    Returns:
        Ascending anchors [B, A] int64 (0 where the row has fewer) and whether each exists [B, A] bool.

    Raises:
        ValueError: no row has two supervised tokens in sequence, so nothing can be learned from the batch.
    """
    possible = anchor_places(loss_mask)
    if not bool(possible.any()):
        raise ValueError(
            f"no anchor in a batch of {possible.shape[0]} sequences: no two supervised tokens meet. Check the loss "
            "mask."
        )
    scores = torch.rand(possible.shape, generator=generator).to(possible.device).masked_fill(~possible, -1.0)
    best = scores.topk(min(num_anchors, possible.shape[1]), dim=1)
    order = torch.where(best.values >= 0, best.indices, possible.shape[1]).sort(dim=1).values
    keep = order < possible.shape[1]
    return torch.where(keep, order, 0), keep


def make_blocks(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    block_size: int,
    segments: torch.Tensor | None = None,
) -> Blocks:
    """Labels of the blocks: the next K tokens, supervised while inside the text and while the mask is contiguous.

    Args:
        input_ids, loss_mask: [B, T].
        anchors, keep: [B, A], from :func:`draw_anchors`.
        block_size: K.
        segments: [B, T], see the module's docstring; ``None``: one text a row.
    """
    rows, length = input_ids.shape
    places = anchors[..., None] + torch.arange(block_size + 1, device=anchors.device)
    inside = places < length
    flat = places.clamp(max=length - 1).view(rows, -1)
    tokens = input_ids.gather(1, flat).view(places.shape)
    supervised = (loss_mask.gather(1, flat).view(places.shape) != 0) & inside
    starts = torch.zeros_like(anchors)
    if segments is not None:
        supervised &= segments.gather(1, flat).view(places.shape) == segments.gather(1, anchors)[..., None]
        starts = text_starts(segments).gather(1, anchors)
    valid = supervised[..., 1:].long().cumprod(dim=-1).bool() & keep[..., None]
    return Blocks(anchors, keep, starts, tokens[..., :-1], tokens[..., 1:], valid, flat.view(places.shape)[..., :-1])


def text_starts(segments: torch.Tensor) -> torch.Tensor:
    """[B, T] int64: for each token, the place of the first token of its text in the row."""
    places = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    new = torch.ones_like(segments, dtype=torch.bool)
    new[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(new, places, 0).cummax(dim=1).values


def slot_weights(valid: torch.Tensor, decay: float) -> torch.Tensor:
    """``exp(-(k - 1) / decay)`` where a slot is supervised, else 0: [B, A, K] float32."""
    slots = torch.arange(valid.shape[-1], device=valid.device, dtype=torch.float32)
    return torch.exp(-slots / decay) * valid


def confidence_loss(confidence: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Binary cross entropy [N] of confidence logits [N] with the chance of survival ``1 - 0.5 * distance``, detached.

    From logits, the gradient of a slot is at most 1: a sure head that is wrong costs much but never pushes much.
    """
    survival = (1.0 - 0.5 * distance.detach()).clamp(0.0, 1.0)
    wide = confidence.to(torch.promote_types(confidence.dtype, torch.float32))
    return F.binary_cross_entropy_with_logits(wide, survival.to(wide.dtype), reduction="none")


def mean_acceptance(distance: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[K] mean of ``1 - 0.5 * distance`` over the supervised slots at each place of a block.

    Args:
        distance: [N] ``sum |p_d - p_t|``, in the order of ``valid``.
        valid: [B, A, K] bool with N true entries.
    """
    full = torch.zeros(valid.shape, device=valid.device)
    full[valid] = 1.0 - 0.5 * distance.detach().float()
    return full.sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
