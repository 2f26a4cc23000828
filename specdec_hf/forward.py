"""One forward of the target: prefill, or a block of drafted tokens behind each row's anchor.

Knows how a forward is called (inputs, masks, positions, taps, roll-back) and nothing of drafting or accepting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _hf
from .cache import SpeculativeCache
from .targets import TapRecorder, accepts_argument, dense_mask, mask_windows, takes_ragged_masks, token_types

_PER_FORWARD = frozenset(
    ["attention_mask", "position_ids", "inputs_embeds", "input_ids", "logits_to_keep", "use_cache", _hf.CACHE_KEY]
)


class TargetRunner:
    """Runs the target over prompt and blocks and keeps its cache, masks and positions in step.

    Args:
        model: the target.
        cache: its key/value memory.
        model_kwargs: what `generate` prepared for the forward.
        recorder: the open tap recorder.
        level: True keeps all rows at one length (2-D masks, any attention implementation); False lets rows differ.
        capacity: slots that a row can fill at most.
    """

    def __init__(
        self,
        model: Any,
        cache: SpeculativeCache,
        model_kwargs: dict[str, Any],
        recorder: TapRecorder,
        level: bool,
        capacity: int,
    ) -> None:
        self.model, self.cache, self._kwargs, self._recorder = model, cache, model_kwargs, recorder
        self.level, self._capacity = level, capacity
        self._lasting = {k: v for k, v in model_kwargs.items() if k not in _PER_FORWARD and not k.endswith("type_ids")}
        self._windows = mask_windows(model)
        self._limits_logits = accepts_argument(model, "logits_to_keep")
        self._mask: Tensor | None = None
        self._valid: Tensor | None = None
        self._model_positions: Tensor | None = None
        self.positions: Tensor  # LongTensor [B], the anchors' rotary positions
        self.filled: list[int] = []  # cached slots of each row
        self.cached_before = 0

    def prefill(self, input_ids: Tensor, generation_config: Any) -> Any:
        """Run the prompt (the part of it that is not cached yet); returns the model's output."""
        self.cached_before = int(self.cache.get_seq_length())
        outputs = _hf.prefill(
            self.model, input_ids, generation_config, {**self._kwargs, **self._recorder.prefill_kwargs}
        )
        filled, batch = int(self.cache.get_seq_length()), input_ids.shape[0]
        self.filled = [filled] * batch
        mask = self._kwargs.get("attention_mask")
        if mask is not None:
            # On the tokens' device, with ones for all tokens to come.
            self._mask = torch.ones(batch, self._capacity, dtype=mask.dtype, device=input_ids.device)
            self._mask[:, : mask.shape[1]] = mask
        if not self.level:
            ones = torch.ones(batch, self._capacity, dtype=torch.bool, device=input_ids.device)
            self._valid = ones if self._mask is None else self._mask.bool()
        self._set_positions(filled, batch, input_ids.device)
        return outputs

    def _set_positions(self, filled: int, batch: int, device: torch.device) -> None:
        given = self._kwargs.get("position_ids")
        if given is not None:
            last = given[..., -1].to(device) + 1
            self._model_positions = last.expand(*last.shape[:-1], batch).clone()
            self.positions = self._model_positions if last.dim() == 1 else self._model_positions[0]
            return
        counted = torch.full((batch,), filled, dtype=torch.long, device=device)
        self.positions = counted if self._mask is None else self._mask[:, :filled].long().sum(dim=1)

    def prompt_columns(self) -> tuple[Tensor, Tensor | None, list[int]]:
        """Of the prompt just prefilled: positions [B, T], validity [B, T] (None = all), and per row the number of
        valid tokens that were cached before.
        """
        filled, batch = self.filled[0], len(self.filled)
        new = filled - self.cached_before
        given = self._kwargs.get("position_ids")
        device = self.positions.device
        if given is not None:
            own = given if given.dim() == 2 else given[0]
            positions = own[:, -new:].to(device).expand(batch, -1)
        elif self._mask is not None:
            positions = (self._mask[:, :filled].long().cumsum(-1) - 1).clamp(min=0)[:, -new:]
        else:
            positions = torch.arange(filled - new, filled, device=device).expand(batch, -1)
        if self._mask is None:
            return positions, None, [self.cached_before] * batch
        held = self._mask[:, :filled].bool()
        return positions, held[:, self.cached_before :], held[:, : self.cached_before].sum(dim=1).tolist()

    def prompt_mask(self) -> Tensor | None:
        """bool [B, C], True at text, over the columns that the cache holds after the prefill; None = no padding."""
        return None if self._mask is None else self._mask[:, : self.filled[0]].bool()

    def block(self, ids: Tensor, lengths: list[int], width: int) -> Any:
        """Run each row's anchor and the tokens drafted behind it.

        Args:
            ids: LongTensor [B, capacity]; row b's block is `ids[b, lengths[b] - 1 : lengths[b] + width]`.
            lengths: committed tokens of each row, the anchor included.
            width: drafted tokens in the block (the longest row's).

        Returns:
            The model's output, logits for all `width + 1` places; and the block's positions [B, width + 1] and tokens.
        """
        steps = torch.arange(width + 1, device=ids.device)
        inputs: dict[str, Any] = dict(self._lasting)
        if self._model_positions is not None:
            inputs["position_ids"] = self._model_positions[..., None] + steps
        if self._limits_logits:
            inputs["logits_to_keep"] = 0
        inputs.update(token_types(self._kwargs, width + 1))
        if self.level or len(lengths) == 1:
            end = lengths[0] + width
            tokens, source, next_length = ids[:, lengths[0] - 1 : end], ids[:, :end], width + 1
            mask = None if self._mask is None else self._mask[:, : self.filled[0] + width + 1]
        else:
            columns = torch.tensor(lengths, device=ids.device)[:, None] - 1 + steps
            tokens = source = ids.gather(1, columns)
            next_length = None
            assert self._valid is not None
            mask = dense_mask(self.model, self._ragged_masks(width + 1))
        if mask is not None:
            inputs["attention_mask"] = mask
        inputs = self.model.prepare_inputs_for_generation(
            source,
            next_sequence_length=next_length,
            is_first_iteration=False,
            use_cache=True,
            **{_hf.CACHE_KEY: self.cache},
            **inputs,
        )
        outputs = self.model(**{**inputs, **self._recorder.forward_kwargs}, return_dict=True)
        return outputs, self.positions[:, None] + steps, tokens

    def _ragged_masks(self, added: int) -> dict[bool, Tensor]:
        if self.cache.rows.tensor is None:
            self._commit_rows()
        assert self._valid is not None
        return self.cache.ragged_mask(self._valid, added, self._windows)

    def commit(self, counts: list[int]) -> None:
        """Keep the first `counts[b]` tokens of each row's block in the cache; take back the rest."""
        self.filled = [have + new for have, new in zip(self.filled, counts, strict=True)]
        if len(set(counts)) == 1:
            added: Any = counts[0]
        else:
            added = torch.tensor(counts, device=self.positions.device)
        self.positions = self.positions + added
        if self._model_positions is not None:
            self._model_positions = self._model_positions + added
        if self.level or len(self.filled) == 1:
            self.cache.commit(self.filled[0])
        else:
            self._commit_rows()

    def _commit_rows(self) -> None:
        lengths = torch.tensor(self.filled, device=self.positions.device)
        self.cache.commit_rows(lengths, max(self.filled), min(self.filled))

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows of the batch, in that order."""
        index = torch.tensor(rows, device=self.positions.device)
        self.cache.select_rows(index)
        self.filled = [self.filled[row] for row in rows]
        self.positions = self.positions[index]
        if self._model_positions is not None:
            self._model_positions = self._model_positions[..., index]
        if self._mask is not None:
            self._mask = self._mask[index]
        if self._valid is not None:
            self._valid = self._valid[index]
        for name, value in self._kwargs.items():
            if name.endswith("type_ids") and isinstance(value, Tensor):
                self._kwargs[name] = value[index]
        if len(rows) == 1:
            self.cache.rows.tensor = None
            self.cache.commit(self.filled[0])
        elif not self.level:
            self._commit_rows()


def must_stay_level(model: Any) -> bool:
    """Whether the target's attention cannot take rows of different lengths in one forward."""
    return not takes_ragged_masks(model)
