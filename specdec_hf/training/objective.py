"""One training forward of a DSpark head: blocks are drawn, drafted in parallel and compared with the target.

Letters as in :mod:`specdec_hf.training.losses`; m is the number of taps.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .losses import Blocks, Losses, LossWeights, chunked_losses, combine, draw_anchors, make_blocks, slot_weights


class DSparkObjective(nn.Module):
    """A head, its frozen target's lm_head and the loss, as one module whose forward returns the loss.

    Args:
        head: a :class:`~specdec_hf.heads.DSparkDraftModel`.
        target: the target; its parameters are frozen here, and it is not registered, so it is neither saved nor
            moved with this module.
        weights: factors of the losses.
        num_anchors: blocks drawn in each sequence of each step.
        chunk: slots whose logits are alive at a time; ``None``: all at once, without computing them again.
        sample_slots: in training, draw slots in proportion to their weight instead of weighting them all: the same loss
            in expectation, for about half of the vocabulary's cost (a CPU feels it).
    """

    def __init__(
        self,
        head: Any,
        target: nn.Module,
        weights: LossWeights | None = None,
        num_anchors: int = 64,
        chunk: int | None = 1024,
        sample_slots: bool = False,
    ) -> None:
        super().__init__()
        target.requires_grad_(False)
        self.head = head.bind(target)
        self.weights = weights or LossWeights()
        self.num_anchors, self.chunk, self.sample_slots = num_anchors, chunk, sample_slots
        # In a tuple, so that nn.Module does not register the target.
        self._target: tuple[Any] = (target,)

    def _lm_head(self) -> Any:
        return self._target[0].get_output_embeddings()

    def label_ids(self, labels: torch.Tensor) -> torch.Tensor:
        """Draft ids of target ids, -1 where the head cannot propose the id; any shape."""
        if not self.head.config.has_reduced_vocab:
            return labels
        ids = self.head.draft_token_ids()
        places = torch.searchsorted(ids, labels.contiguous()).clamp(max=len(ids) - 1)
        return torch.where(ids[places] == labels, places, -1)

    def features(self, blocks: Blocks, input_ids: torch.Tensor, taps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of every slot: normed hidden [B, A, K, D], Markov latent [B, A, K, r] and confidence logits [B, A, K].

        The last two are ``None`` without these heads. Teacher forcing: the token before a slot is the true one.
        """
        hidden = self.head.block_forward(taps, blocks.anchors, input_ids)
        markov = self.head.markov_head
        if markov is None:
            confidence = None if self.head.confidence_head is None else self.head.confidence_head(hidden, None)
            return hidden, None, confidence  # type: ignore[return-value]
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
        return hidden, latent, confidence  # type: ignore[return-value]

    def draft_logits(self, hidden: torch.Tensor, latent: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., Vd] of a slot, Markov bias included."""
        logits = self.head.project_logits(hidden)
        return logits if latent is None else logits + self.head.markov_head.markov_w2(latent)

    def target_logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits [n, Vd] at the ids the head proposes, of last hidden states [n, Dt]."""
        head, module = self.head, self._lm_head()
        plain = type(module) is nn.Linear and head.config.has_reduced_vocab
        if plain:
            if getattr(self, "_rows", None) is None:
                ids = head.draft_token_ids()
                self._rows = (module.weight.detach()[ids], None if module.bias is None else module.bias.detach()[ids])
            logits = F.linear(last_hidden.to(self._rows[0].dtype), *self._rows)
        else:
            logits = module(last_hidden.to(module.weight.dtype))[..., : head.config.vocab_size]
            if head.config.has_reduced_vocab:
                logits = logits[..., head.draft_token_ids()]
        cap = head.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def log_mass(self, last_hidden: torch.Tensor, chunk: int = 1024) -> torch.Tensor:
        """Log-sum-exp [n] of the target's logits over its whole vocabulary, in chunks."""
        module, cap = self._lm_head(), self.head.config.final_logit_softcapping
        pieces = []
        with torch.no_grad():
            for part in last_hidden.split(chunk):
                logits = module(part.to(module.weight.dtype)).float()[..., : self.head.config.vocab_size]
                pieces.append((logits if cap is None else torch.tanh(logits / cap) * cap).logsumexp(-1))
        return torch.cat(pieces)

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        taps: torch.Tensor,
        last_hidden: torch.Tensor,
        target_log_mass: torch.Tensor | None = None,
        anchors: tuple[torch.Tensor, torch.Tensor] | None = None,
        generator: torch.Generator | None = None,
        normaliser: torch.Tensor | None = None,
    ) -> Losses:
        """The losses of a batch.

        Args:
            input_ids, loss_mask: [B, T].
            taps: [B, T, m * Dt] hidden states of the tapped layers.
            last_hidden: [B, T, Dt] hidden states after the target's final norm.
            target_log_mass: [B, T], :meth:`log_mass` of ``last_hidden`` if it was kept; else computed here.
            anchors: anchors and keep [B, A]; default: drawn afresh.
            generator: for the draw.
            normaliser: see :func:`~specdec_hf.training.losses.combine`.
        """
        drawn = anchors or draw_anchors(loss_mask, self.num_anchors, generator)
        blocks = make_blocks(input_ids, loss_mask, *drawn, self.head.max_draft_tokens)
        hidden, latent, confidence = self.features(blocks, input_ids, taps)
        valid, weights = blocks.valid, self.weights
        if self.sample_slots and self.training:
            valid = valid & (torch.rand(valid.shape, device=valid.device) < slot_weights(valid, weights.decay))
            weights = replace(weights, decay=math.inf)
        rows = torch.arange(len(input_ids), device=input_ids.device)[:, None, None].expand_as(valid)[valid]
        places = blocks.sources[valid]
        aligned = last_hidden[rows, places]
        mass = None
        if self.head.config.has_reduced_vocab:
            mass = self.log_mass(aligned) if target_log_mass is None else target_log_mass[rows, places]
        slots = chunked_losses(
            (hidden[valid],) if latent is None else (hidden[valid], latent[valid]),
            aligned,
            mass,
            self.label_ids(blocks.labels[valid]),
            None if confidence is None else confidence[valid],
            self.draft_logits,
            self.target_logits,
            self.chunk,
        )
        return combine(*slots, valid, weights, normaliser)
