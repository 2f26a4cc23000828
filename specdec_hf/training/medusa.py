"""Training Medusa heads: each learns the target's distribution of the token it guesses; then its accuracy is measured.

The target stays frozen ("Medusa-1" of Cai et al., arXiv 2401.10774); the loss has, beside the paper's cross entropy,
the distance of the distributions that acceptance depends on. Letters as in :mod:`specdec_hf.training.losses`; here a
slot is one head's guess behind one anchor, and K is the number of heads.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..drafters.medusa import measure
from ..heads.medusa import MedusaConfig, MedusaHead
from .losses import Losses, chunked_losses, combine, draw_anchors, make_blocks, slot_weights
from .objective import DSparkObjective
from .store import Sequence, TokenStore, draft_vocabulary

#: Texts that accuracies are measured on, at most.
_MEASURED = 64


class MedusaObjective(DSparkObjective):
    """Heads, their frozen target's lm_head and the loss, as one module whose forward returns the loss.

    Args:
        head, target, weights, num_anchors, chunk, sample_slots: as in :class:`DSparkObjective`; there is no confidence.
    """

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
        """The losses of a batch; ``acceptance`` has one entry a head.

        Args:
            input_ids, loss_mask: [B, T].
            taps: not read.
            last_hidden: [B, T, D] states after the target's final norm.
            target_log_mass, anchors, generator, normaliser: as in :class:`DSparkObjective`.
        """
        drawn = anchors or draw_anchors(loss_mask, self.num_anchors, generator)
        blocks = make_blocks(input_ids, loss_mask, *drawn, self.head.config.medusa_num_heads)
        # The state that yielded the anchor stands before it; the first token of a text has none.
        valid, weights = blocks.valid & (blocks.anchors > 0)[..., None], self.weights
        if self.sample_slots and self.training:
            valid = valid & (torch.rand(valid.shape, device=valid.device) < slot_weights(valid, weights.decay))
            weights = replace(weights, decay=math.inf)
        every = torch.arange(len(input_ids), device=input_ids.device)[:, None]
        states = last_hidden[every, (blocks.anchors - 1).clamp(min=0)]
        hidden = torch.stack([block(states) for block in self.head.blocks], dim=2)
        numbers = torch.arange(hidden.shape[2], device=valid.device).expand(valid.shape)
        rows, places = every[..., None].expand_as(valid)[valid], blocks.sources[valid]
        aligned, mass = last_hidden[rows, places], None
        if self.head.config.has_reduced_vocab:
            mass = self.log_mass(aligned) if target_log_mass is None else target_log_mass[rows, places]
        slots = chunked_losses(
            (hidden[valid], numbers[valid]), aligned, mass, self.label_ids(blocks.labels[valid]), None,
            self.draft_logits, self.target_logits, self.chunk,
        )  # fmt: skip
        return combine(*slots, valid, weights, normaliser)

    def draft_logits(self, hidden: torch.Tensor, latent: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [n, Vd] of last states [n, D]; `latent` [n] is the number of the head that each belongs to."""
        if self.head.lm_heads is None:
            return self.head.project(hidden)
        assert latent is not None
        logits = hidden.new_empty(len(hidden), self.head.config.draft_vocab_size)
        for head in latent.unique().tolist():
            logits[latent == head] = self.head.project(hidden[latent == head], head)
        return logits


def new_medusa_head(target: Any, fields: dict[str, Any], sequences: list[Sequence], seed: int = 0) -> MedusaHead:
    """Untrained heads for a target: each begins by guessing what the target says next.

    Args:
        target: the target, of any family.
        fields: those of :class:`MedusaConfig` that differ from what is derived from the target.
        sequences: texts that a reduced vocabulary is chosen by.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    config = MedusaConfig.for_target(target.config, **fields)
    head = MedusaHead(config)
    ids = torch.arange(config.vocab_size)
    if config.has_reduced_vocab:
        ids = draft_vocabulary(sequences, config.draft_vocab_size, config.vocab_size)[0]
        head.set_draft_vocabulary(ids)
    weight = getattr(target.get_output_embeddings(), "weight", None)
    if head.lm_heads is not None and isinstance(weight, torch.Tensor) and weight.is_floating_point():
        with torch.no_grad():
            for projection in head.lm_heads.children():
                projection.get_parameter("weight").copy_(weight.detach()[ids.to(weight.device)])
    return head


def measure_held_out(head: MedusaHead, target: Any, config: Any) -> None:
    """Measure accuracies on the texts that a run (a ``TrainConfig``) held out, and write them into its head."""
    texts = [item for item in TokenStore(config.data).load() if int(item.mask[: config.max_length].sum()) > 1]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(config.seed)).tolist()
    chosen = [texts[index] for index in order[: max(min(config.validation, len(texts) // 5, _MEASURED), 1)]]
    measure(head, target, [item.ids for item in chosen], [item.mask.bool() for item in chosen])
    head.save_pretrained(Path(config.output) / "head")


def objective_of(head: nn.Module) -> type[DSparkObjective]:
    """The class of the objective that trains a head."""
    return MedusaObjective if isinstance(head, MedusaHead) else DSparkObjective
