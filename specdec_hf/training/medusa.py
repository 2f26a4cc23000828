"""Training Medusa heads: each learns the target's distribution of the token it guesses; then its accuracy is measured.

The target stays frozen ("Medusa-1" of Cai et al., arXiv 2401.10774); the loss has, beside the paper's cross entropy,
the distance of the distributions that acceptance depends on. Letters as in :mod:`specdec_hf.training.losses`; here a
slot is one head's guess behind one anchor, and K is the number of heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..drafters.medusa import measure
from ..heads.medusa import MedusaConfig, MedusaHead
from .losses import Blocks, Losses, mean_acceptance, text_starts
from .objective import DSparkObjective, States
from .rows import load_texts, split_texts
from .store import Sequence, draft_vocabulary

#: Texts that accuracies are measured on, at most.
_MEASURED = 64


class MedusaObjective(DSparkObjective):
    """Heads, their frozen target's lm_head and the loss, as one module whose forward returns the loss.

    Args:
        head, target, weights, num_anchors, chunk: as in :class:`DSparkObjective`; there is no confidence.
    """

    @property
    def block_slots(self) -> int:
        """Each head guesses one token behind the anchor."""
        return self.head.config.medusa_num_heads

    def _projection_parameters(self) -> list[nn.Parameter]:
        return [] if self.head.lm_heads is None else list(self.head.lm_heads.parameters())

    def supervise(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        anchors: torch.Tensor,
        keep: torch.Tensor,
        segments: torch.Tensor | None = None,
        dice: torch.Tensor | None = None,
    ) -> tuple[Blocks, torch.Tensor]:
        """As in :class:`DSparkObjective`, without anchors that open a text: no state yielded them."""
        starts = 0 if segments is None else text_starts(segments).gather(1, anchors)
        return super().supervise(input_ids, loss_mask, anchors, keep & (anchors > starts), segments, dice)

    def slot_losses(self, states: States, blocks: Blocks, scale: torch.Tensor) -> Losses:
        """As in :class:`DSparkObjective`; ``acceptance`` has one entry a head."""
        valid = blocks.valid
        every = torch.arange(len(states.input_ids), device=valid.device)[:, None]
        before = states.last_hidden[every, (blocks.anchors - 1).clamp(min=0)]  # the state that yielded the anchor
        hidden = torch.stack([block(before) for block in self.head.blocks], dim=2)
        numbers = torch.arange(hidden.shape[2], device=valid.device).expand(valid.shape)
        total, ce, distance = self.vocabulary_losses((hidden[valid], numbers[valid]), states, blocks, scale)
        ce, tv = ((scale * loss).sum().detach() for loss in (ce, distance))
        return Losses(total, ce, tv, torch.zeros_like(ce), mean_acceptance(distance, valid))

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
    texts = load_texts(config.data, config.max_length, target.config.get_text_config().vocab_size)
    numbers = split_texts(texts, max(config.validation, 1), config.seed)[1][:_MEASURED] or [0]
    chosen = [texts[number] for number in numbers]
    measure(head, target, [item.ids for item in chosen], [item.mask.bool() for item in chosen])
    head.save_pretrained(Path(config.output) / "head")
