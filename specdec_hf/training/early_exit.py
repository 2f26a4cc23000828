"""Training an early-exit head: every exit learns the target's own next-token distribution at every answer token.

Nothing is drafted in training: an exit sees what the target's first layers made of the true text, as in decoding, where
the text up to a drafted token is what would be committed. Letters as in :mod:`specdec_hf.training.losses`; here a slot
is a token of an answer, N of them, and D is the target's width.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..heads.early_exit import EarlyExitConfig, EarlyExitHead
from .losses import Losses, chunked_losses, combine
from .objective import DSparkObjective
from .store import Sequence, draft_vocabulary


class EarlyExitObjective(DSparkObjective):
    """A head, its frozen target's lm_head and the loss, as one module whose forward returns the loss.

    Args:
        head, target, weights, chunk: as in :class:`DSparkObjective`; the confidence's weight and the decay do nothing.
        num_anchors: answer tokens drawn in each text of each step; what a token costs is its logits.
    """

    def forward(  # type: ignore[override]  # no blocks are drawn, so there are no anchors to give
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        taps: torch.Tensor,
        last_hidden: torch.Tensor,
        target_log_mass: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        normaliser: torch.Tensor | None = None,
    ) -> Losses:
        """The losses of a batch, the mean over the exits; ``acceptance`` has one entry an exit.

        Args:
            input_ids, loss_mask: [B, T].
            taps: [B, T, E * D], the states after each exit's layers.
            last_hidden: [B, T, D] states after the target's final norm.
            target_log_mass: [B, T], :meth:`log_mass` of ``last_hidden`` if it was kept; else computed here.
            generator: for the draw of tokens.
            normaliser: see :func:`~specdec_hf.training.losses.combine`; for one exit.

        Raises:
            ValueError: no token of the batch is supervised.
        """
        possible = (loss_mask[:, 1:] != 0).to(taps.device)
        if not bool(possible.any()):
            raise ValueError(f"no supervised token in a batch of {len(input_ids)} texts; check the loss mask")
        scores = torch.rand(possible.shape, generator=generator).to(taps.device).masked_fill(~possible, -1.0)
        drawn = scores.topk(min(self.num_anchors, possible.shape[1]), dim=1)
        rows, order = (drawn.values >= 0).nonzero(as_tuple=True)
        places = drawn.indices[rows, order]
        aligned, labels = last_hidden[rows, places], self.label_ids(input_ids[rows, places + 1])
        mass = None
        if self.head.config.has_reduced_vocab:
            mass = self.log_mass(aligned) if target_log_mass is None else target_log_mass[rows, places]
        valid, weights = torch.ones(1, len(rows), 1, dtype=torch.bool, device=taps.device), self.weights
        weights = replace(weights, decay=math.inf)
        parts = []
        for exit, tap in zip(self.head.config.exit_layers, taps.chunk(len(self.head.layers), dim=-1), strict=True):
            hidden = self.head.features(tap[rows, places], exit)
            slots = chunked_losses(
                (hidden,), aligned, mass, labels, None, self.head.project_logits, self.target_logits, self.chunk
            )
            parts.append(combine(*slots, valid, weights, normaliser))
        means = [torch.stack(values).mean(0) for values in list(zip(*parts, strict=True))[:4]]
        return Losses(means[0], means[1], means[2], means[3], torch.cat([part.acceptance for part in parts]))


def new_exit_head(
    target: Any, fields: dict[str, Any], sequences: list[Sequence], norm_scale: float, seed: int = 0
) -> EarlyExitHead:
    """An untrained head for a target; its norms begin as a fraction of the target's final norm.

    Args:
        target: the target, of any family.
        fields: those of :class:`EarlyExitConfig` that differ from what is derived from the target.
        sequences: texts that a reduced vocabulary is chosen by.
        norm_scale: that fraction; with all of it an untrained head is very sure and always wrong.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    config = EarlyExitConfig.for_target(target.config, **fields)
    head = EarlyExitHead(config)
    if config.has_reduced_vocab:
        head.set_draft_vocabulary(draft_vocabulary(sequences, config.draft_vocab_size, config.vocab_size)[0])
    weight = getattr(getattr(target.get_decoder(), "norm", None), "weight", None)
    layers: Any = head.layers
    if isinstance(weight, torch.Tensor) and weight.shape == layers[0].out_norm.weight.shape:
        with torch.no_grad():
            for layer in layers:
                layer.out_norm.weight.copy_(weight * norm_scale)
    return head


def objective_of(head: nn.Module) -> type[DSparkObjective]:
    """The class of the objective that trains a head."""
    return EarlyExitObjective if isinstance(head, EarlyExitHead) else DSparkObjective
