"""A DSpark head in training: many blocks of a sequence in one forward, with gradients and teacher forcing.

The weights and the formulas are those of decoding; only the mask and the order of the loops differ. Losses, anchors and
targets are not known here. Letters as in ``dspark.py``; S tokens of a training sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn
from transformers.utils import ModelOutput

from ._dspark_config import DSparkConfig
from ._layers import ConfidenceHead, DSparkLayer, DSparkRMSNorm, DSparkRotary, MarkovHead


@dataclass
class DSparkOutput(ModelOutput):
    """Result of one training forward.

    Attributes:
        logits: [B, N, P, Vd], Markov bias included.
        confidence_logits: [B, N, P], or ``None`` without a confidence head.
        base_logits: [B, N, P, Vd] before the Markov bias.
        hidden_states: [B, N, P, D] after the final norm.
    """

    logits: torch.Tensor | None = None
    confidence_logits: torch.Tensor | None = None
    base_logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None


class BlockTraining:
    """The training half of :class:`~specdec_hf.heads.dspark.DSparkDraftModel`, which supplies these modules."""

    config: DSparkConfig
    layers: nn.ModuleList
    fc: nn.Linear
    hidden_norm: DSparkRMSNorm
    norm: DSparkRMSNorm
    rotary: DSparkRotary
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    def _block_embeddings(self, anchor_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def project_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits; see the model."""
        raise NotImplementedError

    def draft_layers(self) -> list[DSparkLayer]:
        """The draft's layers, first to last."""
        return cast("list[DSparkLayer]", list(self.layers))

    def _confidence(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor | None:
        return None if self.confidence_head is None else self.confidence_head(hidden, embedded).float()

    def markov_logits(
        self, previous_ids: torch.Tensor, hidden: torch.Tensor, base_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Teacher-forced sequential stage for all slots; equal to :meth:`markov_step` fed with the same tokens.

        Args:
            previous_ids: [..., P] target ids of the token before each slot, the anchor first.
            hidden: [..., P, D].
            base_logits: [..., P, Vd].

        Returns:
            Corrected logits [..., P, Vd] and confidence logits [..., P] (``None`` without the head).
        """
        head = self.markov_head
        if head is None:
            return base_logits, self._confidence(hidden, None)
        embedded = head.embed(previous_ids)
        if head.kind == "rnn":
            state: torch.Tensor | None = None
            outputs = []
            for slot in range(hidden.shape[-2]):
                latent, state = head.latent(state, embedded[..., slot, :], hidden[..., slot, :])
                outputs.append(latent)
            latent = torch.stack(outputs, dim=-2)
        else:
            latent, _ = head.latent(None, embedded, hidden)
        return base_logits + head.markov_w2(latent), self._confidence(hidden, embedded)

    def block_forward(
        self,
        context_features: torch.Tensor,
        anchors: torch.Tensor,
        input_ids: torch.Tensor,
        context_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        context_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Many blocks of the same sequences at once, with gradients; each sees what precedes its anchor, and itself.

        Args:
            context_features: [B, S, m * Dt] taps of every token.
            anchors: [B, N] index of each block's anchor in its sequence. Dummies may hold any index; they are clamped
                to the sequence, give finite values, and are the caller's to mask in the loss.
            input_ids: [B, S].
            context_mask: [B, S] boolean, false for tokens (padding) that no block may see.
            position_ids: [B, S]; default 0 to S - 1.
            context_starts: [B, N] first index that each block may see, where a row holds several texts; default 0.

        Returns:
            Normed hidden states [B, N, P, D]; entry k predicts the token at the anchor + 1 + k.
        """
        config, weight = self.config, self.norm.weight
        rows, length = input_ids.shape
        anchors = anchors.clamp(0, length - 1)
        slots = torch.arange(config.block_size, device=anchors.device)
        if position_ids is None:
            position_ids = torch.arange(length, device=anchors.device).expand(rows, -1)
        block_positions = (position_ids.gather(1, anchors)[..., None] + slots).flatten(1)
        hidden = self._block_embeddings(input_ids.gather(1, anchors)).flatten(1, 2)
        features = self.hidden_norm(self.fc(context_features.to(weight.device, weight.dtype)))
        context_rotary = self.rotary(position_ids, weight.dtype)
        block_rotary = self.rotary(block_positions, weight.dtype)
        groups = _groups(anchors, config.block_size)
        masks: dict[int | None, list[torch.Tensor]] = {}
        for index, layer in enumerate(self.draft_layers()):
            window = config.window_of_layer(index)
            if window not in masks:
                masks[window] = [
                    _training_mask(
                        anchors[:, group.blocks],
                        group.context,
                        config,
                        window,
                        context_mask,
                        None if context_starts is None else context_starts[:, group.blocks],
                    )
                    for group in groups
                ]
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            context_keys, context_values = attention.keys_values(features, context_rotary)
            block_keys, block_values = attention.keys_values(normed, block_rotary)
            queries = attention.queries(normed, block_rotary)
            parts = []
            for group, mask in zip(groups, masks[window], strict=True):
                own, seen = group.slots, group.context
                keys = torch.cat((context_keys[:, :seen], block_keys[:, own]), dim=1).transpose(1, 2)
                values = torch.cat((context_values[:, :seen], block_values[:, own]), dim=1).transpose(1, 2)
                parts.append(attention.attend(queries[:, own], keys, values, mask))
            hidden = layer.after_attention(hidden, parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        hidden = self.norm(hidden).view(rows, -1, config.block_size, config.hidden_size)
        return hidden[:, :, config.block_size - config.max_draft_tokens :]

    def forward(
        self,
        input_ids: torch.Tensor,
        context_features: torch.Tensor,
        anchors: torch.Tensor,
        context_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> DSparkOutput:
        """Training forward: :meth:`block_forward`, lm_head and the teacher-forced heads; arguments as there.

        Labels of block n, slot k are ``input_ids[anchors[n] + 1 + k]``, where that exists.
        """
        hidden = self.block_forward(context_features, anchors, input_ids, context_mask, position_ids)
        slots = torch.arange(hidden.shape[2], device=anchors.device)
        places = (anchors.clamp(min=0)[..., None] + slots).clamp(max=input_ids.shape[1] - 1)
        previous = input_ids.gather(1, places.flatten(1)).view(places.shape)
        base = self.project_logits(hidden)
        logits, confidence = self.markov_logits(previous, hidden, base)
        return DSparkOutput(logits=logits, confidence_logits=confidence, base_logits=base, hidden_states=hidden)


class _Group(NamedTuple):
    """Blocks whose attention is computed together: which, their slots, and how much of the context they may see."""

    blocks: slice
    slots: slice
    context: int


def _groups(anchors: torch.Tensor, block: int, size: int = 64) -> list[_Group]:
    """Neighbouring blocks in groups: a slot's scores with other blocks, which the mask drops, stay few."""
    starts = range(0, max(anchors.shape[1], 1), size)
    groups = []
    for start in starts:
        part = anchors[:, start : start + size]
        seen = int(part.max()) if part.numel() else 0
        groups.append(_Group(slice(start, start + size), slice(start * block, (start + size) * block), seen))
    return groups


def _training_mask(
    anchors: torch.Tensor,
    length: int,
    config: DSparkConfig,
    window: int | None,
    context_mask: torch.Tensor | None,
    context_starts: torch.Tensor | None,
) -> torch.Tensor:
    """[B, 1, N * K, S' + N * K], the first S' context tokens: those before the anchor, and the own block.

    No query is left without a key.
    """
    block = config.block_size
    places = torch.arange(length, device=anchors.device)
    starts = anchors.repeat_interleave(block, dim=1)[..., None]
    seen = places < starts
    if window is not None:
        slots = torch.arange(block, device=anchors.device).repeat(anchors.shape[1])[:, None]
        seen = seen & (places >= starts + (slots if config.window_per_slot else 0) - window)
    if context_starts is not None:
        seen = seen & (places >= context_starts.repeat_interleave(block, dim=1)[..., None])
    if context_mask is not None:
        seen = seen & context_mask[:, None, :length].to(torch.bool)
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
    own = (owner[:, None] == owner).expand(anchors.shape[0], -1, -1)
    return torch.cat((seen, own), dim=-1)[:, None]
