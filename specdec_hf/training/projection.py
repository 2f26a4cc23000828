"""The losses over the vocabulary in chunks of slots, with their gradients from one pass.

A slot's logits are as long as the vocabulary, and a step has thousands of slots. The loss is a sum over slots, so its
gradient is known as soon as a slot's logits are: each chunk's logits are made, turned into gradients of what they were
made from, and dropped. Nothing is computed twice, and no more than about three matrices [chunk, V] live at a time.

Letters: N supervised slots, n slots of a chunk, M places of target hidden states, V (or Vd) vocabulary, Dt width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Projection = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Slots:
    """What is compared with what.

    Attributes:
        target_hidden: [M, Dt] last hidden states of the target (after its final norm).
        target_log_mass: [M] log-sum-exp of the target's logits over the whole of V; ``None`` when Vd is V.
        places: [N] int64, row of ``target_hidden`` that predicts each slot's label. Slots that share a place within a
            chunk share its logits.
        labels: [N] draft ids, -1 where the true token is not among them (no cross entropy there).
        ce_scale, tv_scale: [N] factors of the two losses of each slot.
    """

    target_hidden: torch.Tensor
    target_log_mass: torch.Tensor | None
    places: torch.Tensor
    labels: torch.Tensor
    ce_scale: torch.Tensor
    tv_scale: torch.Tensor


def projected_losses(
    features: tuple[torch.Tensor, ...],
    parameters: Sequence[torch.Tensor],
    slots: Slots,
    draft_projection: Projection,
    target_projection: Projection,
    chunk: int | None = 256,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropy with the labels and ``sum |p_d - p_t|``, weighted and summed, and both slot by slot for reports.

    The target's mass outside of the draft's ids counts in full in the distance. Computed in float32 (float64 for such
    features), whatever the projections return.

    Args:
        features: tensors [N, ...] that ``draft_projection`` turns into draft logits [n, Vd].
        parameters: tensors that ``draft_projection`` uses besides and that may need gradients.
        slots: see there.
        draft_projection: of chunks of ``features``, to a fresh tensor (it is overwritten).
        target_projection: [n, Dt] to the target's logits [n, Vd] at the draft's ids; called without gradient.
        chunk: slots at a time; ``None``: all.

    Returns:
        ``sum(ce_scale * ce + tv_scale * distance)``, a scalar that has a gradient once; ce [N] (0 where the label is
        -1) and distance [N] without.

    Raises:
        ValueError: ``chunk`` is less than 1.
    """
    count = len(slots.labels)
    size = max(count, 1) if chunk is None else chunk
    if size < 1:
        raise ValueError(f"chunk={chunk}: at least one slot at a time is needed; raise it")
    task = _Task(slots, draft_projection, target_projection, size, len(features), torch.is_grad_enabled())
    return _Projected.apply(task, *features, *parameters)


@dataclass(frozen=True)
class _Task:
    slots: Slots
    draft_projection: Projection
    target_projection: Projection
    size: int
    features: int
    grad: bool


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, task: _Task, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slots, wanted = task.slots, [task.grad and tensor.requires_grad for tensor in inputs]
        features, parameters = inputs[: task.features], inputs[task.features :]
        like = features[0]
        dtype = torch.promote_types(like.dtype, torch.float32)
        ce, distance = like.new_zeros(len(slots.labels), dtype=dtype), like.new_zeros(len(slots.labels), dtype=dtype)
        grads = [torch.zeros_like(tensor) if want else None for tensor, want in zip(inputs, wanted, strict=True)]
        for start in range(0, len(slots.labels), task.size):
            part = slice(start, start + task.size)
            pieces = [feature[part].detach() for feature in features]
            with torch.set_grad_enabled(any(wanted)):
                for piece, want in zip(pieces, wanted, strict=False):
                    piece.requires_grad_(want)
                logits = task.draft_projection(*pieces)
            ce[part], distance[part], slope = _chunk_losses(logits, task, part, dtype, any(wanted))
            leaves = [leaf for leaf, want in zip([*pieces, *parameters], wanted, strict=True) if want]
            if not leaves:
                continue
            # Autocast chose the types on the way there; on the way back the graph's own types hold.
            with torch.autocast(logits.device.type, enabled=False):
                found = iter(torch.autograd.grad(logits, leaves, slope.to(logits.dtype), allow_unused=True))
            del logits, slope
            for index, total in enumerate(grads):
                if total is not None and (piece := next(found)) is not None:
                    (total[part] if index < task.features else total).add_(piece)
        ctx.grads = grads
        ctx.mark_non_differentiable(ce, distance)
        total = (slots.ce_scale.to(dtype) * ce + slots.tv_scale.to(dtype) * distance).sum()
        return total, ce, distance

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        assert ctx.grads is not None, "the gradient of projected_losses can be taken once"
        grads, ctx.grads = ctx.grads, None
        return None, *(None if grad is None else grad.mul_(upstream[0]) for grad in grads)


def _chunk_losses(
    logits: torch.Tensor, task: _Task, part: slice, dtype: torch.dtype, with_slope: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropy [n], distance [n], and the weighted loss's gradient [n, Vd] by the draft's logits.

    With p and q the two distributions and s = sign(p - q): d ce / dz = p - onehot, d distance / dz = p * (s - <p, s>).
    Works in place, over the logits too: a projection ends in a sum or product, whose result its gradient does not need
    (autograd notices if one does).
    """
    slots, draft = task.slots, logits.detach().to(dtype)
    labels = slots.labels[part]
    known = labels >= 0
    rows, columns = known.nonzero()[:, 0], labels[known]
    mass = draft.logsumexp(dim=-1, keepdim=True)
    ce = torch.zeros_like(mass[:, 0])
    ce[rows] = mass[rows, 0] - draft[rows, columns]
    draft.sub_(mass).exp_()
    gap, outside = _target_probs(task, part, dtype)
    gap.sub_(draft)
    distance = torch.linalg.vector_norm(gap, 1, dim=-1) + outside
    if not with_slope:
        return ce, distance, gap
    slope = gap.sign_().neg_()
    ce_scale, tv_scale = slots.ce_scale[part].to(dtype) * known, slots.tv_scale[part].to(dtype)
    centre = torch.linalg.vecdot(draft, slope)
    slope.sub_(centre[:, None]).mul_(tv_scale[:, None]).add_(ce_scale[:, None]).mul_(draft)
    slope[rows, columns] -= ce_scale[rows]
    return ce, distance, slope


def _target_probs(task: _Task, part: slice, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's probabilities [n, Vd], a fresh tensor, and its mass outside of the draft's ids [n]."""
    slots = task.slots
    places, back = torch.unique(slots.places[part], return_inverse=True)
    probs = task.target_projection(slots.target_hidden[places]).to(dtype)
    if slots.target_log_mass is None:
        mass = probs.logsumexp(dim=-1)
    else:
        mass = slots.target_log_mass[places].to(dtype)
    probs = probs.sub_(mass[:, None]).exp_()
    outside = torch.zeros_like(mass)
    if slots.target_log_mass is not None:
        outside = (1.0 - probs.sum(dim=-1)).clamp(min=0.0)
    if len(places) == len(back) and bool((back[1:] > back[:-1]).all()):
        return probs, outside
    return probs[back], outside[back]
