"""One training forward of a DSpark head: blocks are drafted in parallel and compared with the target.

Letters as in :mod:`specdec_hf.training.losses` and :mod:`specdec_hf.training.projection`; m is the number of taps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..targets import finished_logits
from .features import log_mass
from .losses import (
    Blocks,
    Losses,
    LossWeights,
    confidence_loss,
    draw_anchors,
    make_blocks,
    mean_acceptance,
    slot_weights,
    text_starts,
)
from .projection import Slots, projected_losses


class States(NamedTuple):
    """What a batch's losses are computed from.

    Attributes:
        input_ids: [B, T].
        taps: [B, T, m * Dt] hidden states of the tapped layers.
        last_hidden: [B, T, Dt] hidden states after the target's final norm.
        target_log_mass: [B, T], :func:`~specdec_hf.training.features.log_mass` of ``last_hidden`` if it was kept.
        positions: [B, T] of the tokens in their texts, where a row may hold several.
    """

    input_ids: torch.Tensor
    taps: torch.Tensor
    last_hidden: torch.Tensor
    target_log_mass: torch.Tensor | None = None
    positions: torch.Tensor | None = None


class DSparkObjective(nn.Module):
    """A head, its frozen target's lm_head and the loss, as one module whose forward returns the loss.

    Args:
        head: a :class:`~specdec_hf.heads.DSparkDraftModel`.
        target: the target; its parameters are frozen here, and it is not registered, so it is neither saved nor
            moved with this module.
        weights: factors of the losses.
        num_anchors: blocks drawn in each sequence where the caller gives none.
        chunk: slots whose logits are alive at a time; ``None``: all at once.
    """

    def __init__(
        self,
        head: Any,
        target: nn.Module,
        weights: LossWeights | None = None,
        num_anchors: int = 64,
        chunk: int | None = 256,
    ) -> None:
        super().__init__()
        target.requires_grad_(False)
        self.head = head.bind(target)
        self.weights = weights or LossWeights()
        self.num_anchors, self.chunk = num_anchors, chunk
        # In a tuple, so that nn.Module does not register the target.
        self._target: tuple[Any] = (target,)

    def _lm_head(self) -> Any:
        return self._target[0].get_output_embeddings()

    @property
    def block_slots(self) -> int:
        """K: labels that follow an anchor."""
        return self.head.max_draft_tokens

    def label_ids(self, labels: torch.Tensor) -> torch.Tensor:
        """Draft ids of target ids, -1 where the head cannot propose the id; any shape."""
        if not self.head.config.has_reduced_vocab:
            return labels
        ids = self.head.draft_token_ids()
        places = torch.searchsorted(ids, labels.contiguous()).clamp(max=len(ids) - 1)
        return torch.where(ids[places] == labels, places, -1)

    def features(
        self, blocks: Blocks, input_ids: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Of every slot: normed hidden [B, A, K, D], Markov latent [B, A, K, r] and confidence logits [B, A, K].

        The last two are ``None`` without these heads. Teacher forcing: the token before a slot is the true one.
        ``positions`` [B, T] are those of the tokens in their texts, where a row holds several.
        """
        starts = None if positions is None else blocks.starts
        hidden = self.head.block_forward(taps, blocks.anchors, input_ids, position_ids=positions, context_starts=starts)
        markov = self.head.markov_head
        if markov is None:
            confidence = None if self.head.confidence_head is None else self.head.confidence_head(hidden, None)
            return hidden, None, confidence
        embedded = markov.embed(blocks.previous)
        if markov.kind == "rnn":
            state, steps = None, []
            for slot in range(hidden.shape[2]):
                latent, state = markov.latent(state, embedded[:, :, slot], hidden[:, :, slot])
                steps.append(latent)
            latent = torch.stack(steps, dim=2)
        else:
            latent, _ = markov.latent(None, embedded, hidden)
        confidence = None if self.head.confidence_head is None else self.head.confidence_head(hidden, embedded)
        return hidden, latent, confidence

    def draft_logits(self, hidden: torch.Tensor, latent: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., Vd] of a slot, Markov bias included."""
        logits = self.head.project_logits(hidden)
        if latent is None:
            return logits
        bias = self.head.markov_head.markov_w2(latent)
        # In place where that rounds nothing: a matrix as long as the vocabulary less.
        return logits.add_(bias) if logits.dtype == bias.dtype else logits + bias

    def target_logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits [n, Vd] at the ids the head proposes, of last hidden states [n, Dt]."""
        head, target, module = self.head, self._target[0], self._lm_head()
        plain = type(module) is nn.Linear and head.config.has_reduced_vocab
        if plain:
            if getattr(self, "_rows", None) is None:
                ids = head.draft_token_ids()
                self._rows = (module.weight.detach()[ids], None if module.bias is None else module.bias.detach()[ids])
            return finished_logits(target, F.linear(last_hidden.to(self._rows[0].dtype), *self._rows))
        logits = module(last_hidden.to(module.weight.dtype))[..., : head.config.vocab_size]
        return finished_logits(target, logits[..., head.draft_token_ids()] if head.config.has_reduced_vocab else logits)

    def supervise(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        anchors: torch.Tensor,
        keep: torch.Tensor,
        segments: torch.Tensor | None = None,
        dice: torch.Tensor | None = None,
    ) -> tuple[Blocks, torch.Tensor]:
        """The blocks of a batch and the weight [B, A, K] of each slot, 0 where it teaches nothing.

        The sum of the weights over all batches of an update, on all processes, is what :meth:`forward` must be given as
        ``normaliser``.

        Args:
            input_ids, loss_mask, segments: [B, T].
            anchors, keep: [B, A].
            dice: [B, A, K] uniform in [0, 1): slots are drawn in proportion to their weight instead of weighted. The
                same loss in expectation, for about half of the vocabulary's cost (a CPU feels it).
        """
        blocks = make_blocks(input_ids, loss_mask, anchors, keep, self.block_slots, segments)
        weights = slot_weights(blocks.valid, self.weights.decay)
        if dice is not None:
            weights = (dice < weights).float()
            blocks = blocks._replace(valid=blocks.valid & (weights > 0))
        return blocks, weights

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        taps: torch.Tensor,
        last_hidden: torch.Tensor,
        target_log_mass: torch.Tensor | None = None,
        anchors: tuple[torch.Tensor, torch.Tensor] | None = None,
        segments: torch.Tensor | None = None,
        dice: torch.Tensor | None = None,
        normaliser: torch.Tensor | None = None,
    ) -> Losses:
        """The losses of a batch: ``sum(w * loss) / normaliser`` for each, then the weighted sum of the three.

        Args:
            input_ids, loss_mask: [B, T].
            taps: [B, T, m * Dt] hidden states of the tapped layers.
            last_hidden: [B, T, Dt] hidden states after the target's final norm.
            target_log_mass: [B, T], :func:`~specdec_hf.training.features.log_mass` of ``last_hidden`` if it was kept;
                else computed here.
            anchors: anchors and keep [B, A]; default: drawn afresh, for rows of one text.
            segments, dice: see :meth:`supervise`.
            normaliser: sum of the weights w over the *global* batch if this is a part of it (several processes,
                accumulation); default: over this batch.
        """
        drawn = anchors or draw_anchors(loss_mask, self.num_anchors)
        blocks, slots = self.supervise(input_ids, loss_mask, *drawn, segments, dice)
        positions = None
        if segments is not None:
            positions = torch.arange(segments.shape[1], device=segments.device) - text_starts(segments)
        weight = slots[blocks.valid]
        scale = weight / (weight.sum().clamp(min=1e-9) if normaliser is None else normaliser)
        return self.slot_losses(States(input_ids, taps, last_hidden, target_log_mass, positions), blocks, scale)

    def slot_losses(self, states: States, blocks: Blocks, scale: torch.Tensor) -> Losses:
        """The losses of a batch's N supervised slots; this is what differs between the kinds of heads.

        Args:
            states: see there.
            blocks: anchors, labels and which slots are supervised.
            scale: [N] weight of each slot, as a share of the update's.
        """
        valid = blocks.valid
        hidden, latent, confidence = self.features(blocks, states.input_ids, states.taps, states.positions)
        features = (hidden[valid],) if latent is None else (hidden[valid], latent[valid])
        total, ce, distance = self.vocabulary_losses(features, states, blocks, scale)
        if confidence is None:
            doubt = torch.zeros_like(scale)
        else:
            doubt = confidence_loss(confidence[valid], distance)
            total = total + self.weights.confidence * (scale * doubt).sum()
        ce, tv, bce = ((scale * loss).sum().detach() for loss in (ce, distance, doubt))
        return Losses(total, ce, tv, bce, mean_acceptance(distance, valid))

    def vocabulary_losses(
        self, features: tuple[torch.Tensor, ...], states: States, blocks: Blocks, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cross entropy and distance of N slots with the factors of ``weights``.

        Args:
            features: tensors [N, ...] that :meth:`draft_logits` turns into draft logits [n, Vd].
            states, blocks, scale: see :meth:`slot_losses`.

        Returns:
            The weighted sum, with a gradient; cross entropy [N] and ``sum |p_d - p_t|`` [N] without.
        """
        flat, mass = states.last_hidden.flatten(0, 1), states.target_log_mass
        places = blocks.flat_sources(states.input_ids.shape[1])[blocks.valid]
        if not self.head.config.has_reduced_vocab:
            mass = None
        else:
            mass = self._log_mass(flat, places) if mass is None else mass.flatten()
        labels = self.label_ids(blocks.labels[blocks.valid])
        slots = Slots(flat, mass, places, labels, self.weights.ce * scale, self.weights.tv * scale)
        parameters = self._projection_parameters()
        return projected_losses(features, parameters, slots, self.draft_logits, self.target_logits, self.chunk)

    def _projection_parameters(self) -> list[nn.Parameter]:
        modules = [self.head.lm_head, None if self.head.markov_head is None else self.head.markov_head.markov_w2]
        return [parameter for module in modules if module is not None for parameter in module.parameters()]

    def _log_mass(self, flat: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[M], filled at ``places`` alone."""
        used = places.unique()
        mass = torch.zeros(len(flat), dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
        mass[used] = log_mass(self._target[0], flat[used], self.head.config.vocab_size).to(mass.dtype)
        return mass
