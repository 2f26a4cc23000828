"""Training an early-exit head: every exit learns the target's own next-token distribution at every answer token.

Nothing is drafted in training: an exit sees what the target's first layers made of the true text, as in decoding, where
the text up to a drafted token is what would be committed. Letters as in :mod:`specdec_hf.training.losses`; here a block
has one slot, E is the number of exits, and D is the target's width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..heads.early_exit import EarlyExitConfig, EarlyExitHead
from .losses import Blocks, Losses, mean_acceptance
from .objective import DSparkObjective, States
from .store import Sequence, draft_vocabulary


class EarlyExitObjective(DSparkObjective):
    """A head, its frozen target's lm_head and the loss, as one module whose forward returns the loss.

    Args:
        head, target, weights, chunk: as in :class:`DSparkObjective`; the confidence's weight and the decay do nothing.
        num_anchors: answer tokens drawn in each text of each step; what a token costs is its logits.
    """

    @property
    def block_slots(self) -> int:
        """An anchor teaches the token behind it and no more."""
        return 1

    def _projection_parameters(self) -> list[nn.Parameter]:
        return []  # the lm_head is the target's

    def draft_logits(self, hidden: torch.Tensor, latent: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., Vd] of an exit's features [..., D]; there is no ``latent``."""
        return self.head.project_logits(hidden)

    def slot_losses(self, states: States, blocks: Blocks, scale: torch.Tensor) -> Losses:
        """The mean over the exits; ``acceptance`` has one entry an exit. ``states.taps`` are those behind each exit."""
        valid, exits = blocks.valid, self.head.config.exit_layers
        places = blocks.flat_sources(states.input_ids.shape[1])[valid]
        scale = scale / len(exits)
        total, ce, tv, acceptance = scale.new_zeros(()), scale.new_zeros(()), scale.new_zeros(()), []
        for exit, tap in zip(exits, states.taps.flatten(0, 1).chunk(len(exits), dim=-1), strict=True):
            own, entropy, distance = self.vocabulary_losses(
                (self.head.features(tap[places], exit),), states, blocks, scale
            )
            total = total + own
            ce, tv = ce + (scale * entropy).sum().detach(), tv + (scale * distance).sum().detach()
            acceptance.append(mean_acceptance(distance, valid))
        return Losses(total, ce, tv, torch.zeros_like(ce), torch.cat(acceptance))


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
