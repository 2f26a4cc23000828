"""One forward of the target: prefill, or a block of drafted tokens behind each row's anchor.

Knows how a forward is called (inputs, masks, positions, taps, roll-back) and nothing of drafting or accepting.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _hf
from ._hf import text_config
from .cache import SpeculativeCache
from .recurrent import MixerReplay
from .targets import (
    TapRecorder,
    accepts_argument,
    decoder_layers,
    dense_mask,
    mask_windows,
    takes_ragged_masks,
    token_types,
)
from .tree import TokenTree

if TYPE_CHECKING:
    from .early import EarlyLayers

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
        self.early: EarlyLayers | None = None  # has read a block's tokens with the first layers already
        self._width = 0  # tokens of the latest block
        self._replay: MixerReplay | None = None  # only where there are recurrent states to take back
        if recurrent := cache.recurrent:
            self._replay = MixerReplay(decoder_layers(model), recurrent)
            cache.on_state_update = self._replay.note_update

    def __enter__(self) -> TargetRunner:
        if self._replay is not None:
            self._replay.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._replay is not None:
            self._replay.__exit__(*exception)

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

    def block(self, ids: Tensor, lengths: list[int], width: int, tree: TokenTree | None = None) -> Any:
        """Run each row's anchor and the tokens drafted behind it.

        Args:
            ids: LongTensor [B, capacity]; row b's block is `ids[b, lengths[b] - 1 : lengths[b] + width]`.
            lengths: committed tokens of each row, the anchor included.
            width: drafted tokens in the block (the longest row's).
            tree: how they stand to one another; None = a chain.

        Returns:
            The model's output, logits for all `width + 1` places; and the block's positions [B, width + 1] and tokens.
        """
        model = self.model if self.early is None else self.early.rest_of_model(width + 1)
        steps = torch.arange(width + 1, device=ids.device) if tree is None else tree.steps
        inputs: dict[str, Any] = dict(self._lasting)
        if self._model_positions is not None:
            inputs["position_ids"] = self._model_positions[..., None] + steps
        elif tree is not None:
            inputs["position_ids"] = self.positions[:, None] + steps
        inputs.update(token_types(self._kwargs, width + 1))
        if tree is None and (self.level or len(lengths) == 1):
            end = lengths[0] + width
            tokens, source, next_length = ids[:, lengths[0] - 1 : end], ids[:, :end], width + 1
            mask = None if self._mask is None else self._mask[:, : self.filled[0] + width + 1]
        else:
            columns = torch.tensor(lengths, device=ids.device)[:, None] - 1 + torch.arange(width + 1, device=ids.device)
            tokens = source = ids.gather(1, columns)
            next_length = None
            masks = self._ragged_masks(width + 1) if tree is None else self._tree_masks(tree)
            mask = dense_mask(self.model, masks)
        if mask is not None:
            inputs["attention_mask"] = mask
        inputs = model.prepare_inputs_for_generation(
            source,
            next_sequence_length=next_length,
            is_first_iteration=False,
            use_cache=True,
            **{_hf.CACHE_KEY: self.cache},
            **inputs,
        )
        if self._limits_logits:
            inputs["logits_to_keep"] = 0  # after preparing: some families put a number of their own there
        self._width = width + 1
        if self._replay is not None and width > 0:
            self.cache.save_states()
        outputs = model(**{**inputs, **self._recorder.forward_kwargs}, return_dict=True)
        if outputs.logits.shape[1] != width + 1:
            raise ValueError(
                f"{type(self.model).__name__} returned logits for {outputs.logits.shape[1]} of {width + 1} tokens, and "
                "speculation needs all: make its forward return them (logits_to_keep=0), or leave out the assistant."
            )
        return outputs, self.positions[:, None] + steps, tokens

    def ahead(self, model: Any, cache: SpeculativeCache) -> TargetRunner:
        """A runner that goes on from here with a part of the model and of the cache; this one stays where it is."""
        runner = copy.copy(self)
        runner.model, runner.cache, runner.early, runner._replay = model, cache, None, None
        return runner

    def _ragged_masks(self, added: int) -> dict[bool, Tensor]:
        if self.cache.rows.tensor is None:
            self._commit_rows()
        assert self._valid is not None
        return self.cache.ragged_mask(self._valid, added, self._windows)

    def _tree_masks(self, tree: TokenTree) -> dict[bool, Tensor]:
        if self._valid is None:  # level rows
            shape = (len(self.filled), self._capacity)
            ones = torch.ones(shape, dtype=torch.bool, device=self.positions.device)
            self._valid = ones if self._mask is None else self._mask.bool()
        if not self.level and len(self.filled) > 1 and self.cache.rows.tensor is None:
            self._commit_rows()
        lengths = torch.tensor(self.filled, device=self.positions.device)
        return self.cache.tree_mask(self._valid, lengths, tree.steps, tree.ancestors, self._windows)

    def keep_path(self, columns: list[list[int]]) -> None:
        """Of a tree's block, move each row's path together, so that `commit` can keep it as a chain's first tokens.

        Args:
            columns: per row, columns of the block (0 = the anchor, first) that are kept; only what has to move moves.
        """
        longest = max(map(len, columns))
        moved = [own + list(range(len(own), longest)) for own in columns]
        if any(own != list(range(longest)) for own in moved):
            device = self.positions.device
            self.cache.keep_path(torch.tensor(self.filled, device=device), torch.tensor(moved, device=device)[:, 1:])

    def commit(self, counts: list[int]) -> None:
        """Keep the first `counts[b]` tokens of each row's block in the cache; take back the rest."""
        self.filled = [have + new for have, new in zip(self.filled, counts, strict=True)]
        if self._replay is not None and counts[0] < self._width:
            assert len(set(counts)) == 1, "rows with recurrent states stay level"
            self.cache.restore_states()
            self._replay.run(self._width, counts[0])
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


def takes_trees(model: Any) -> bool:
    """Whether the target can verify trees: dense 4-D masks, and positions that are told to it, not counted by it."""
    return takes_ragged_masks(model) and accepts_argument(model, "position_ids")


_CONTINUES: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
_PROBE = (6, 8, 2)  # tokens read first, tokens of the block, and how many of those are kept


def cannot_replay(model: Any) -> str | None:
    """Why a target with recurrent layers cannot take back tokens, in words; None if it can. Tried once a model.

    Some families read several tokens as if nothing came before them once there is a state (transformers 5.24: Bamba,
    Jamba), in others one token is computed otherwise than several (Nemotron-H, Zamba 2). So a short text is read at
    once, and again in parts: some tokens are taken back, and what follows is read one by one as plain decoding does.
    """
    if model not in _CONTINUES:
        _CONTINUES[model] = _try_replay(model)
    return _CONTINUES[model]


@torch.no_grad()
def _try_replay(model: Any) -> str | None:
    start, width, kept = _PROBE
    decoder = model.get_decoder()
    config = text_config(model)
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(1, start + width + 1, device=device)[None] % config.vocab_size
    whole = decoder(input_ids=ids, use_cache=False).last_hidden_state.float()
    cache = SpeculativeCache(_hf.DynamicCache(config=config), 2 * ids.shape[1])
    replay = MixerReplay(decoder_layers(model), cache.recurrent)
    cache.on_state_update = replay.note_update

    def read(tokens: Tensor) -> Tensor:
        return decoder(input_ids=tokens, use_cache=True, **{_hf.CACHE_KEY: cache}).last_hidden_state.float()

    def error(states: Tensor) -> float:
        expected = whole[:, start : start + states.shape[1]]
        return float(((states - expected).pow(2).mean() / expected.var()).sqrt())

    with replay:
        read(ids[:, :start])
        cache.save_states()
        cache.forget_states()
        forgetful = error(read(ids[:, start:]))
        cache.restore_states()
        cache.commit(start)
        cache.save_states()
        block = read(torch.cat((ids[:, start : start + kept], ids[:, : width - kept]), dim=1))
        if not replay.is_complete:
            return "the modules that own its recurrent states were not seen running (is it compiled?)"
        cache.restore_states()
        replay.run(width, kept)
        cache.commit(start + kept)
        rest = [read(token[:, None]) for token in ids[:, start + kept :].unbind(1)]
    # A state that was ignored errs as much as one that was forgotten; 16-bit types round in every layer.
    limit = 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.1
    if not error(torch.cat((block[:, :kept], *rest), dim=1)) < limit * min(1.0, 2 * forgetful):
        return "its recurrent layers do not read several tokens as they read them one by one"
    return None


def must_stay_level(model: Any) -> bool:
    """Whether the target's attention cannot take rows of different lengths in one forward."""
    return not takes_ragged_masks(model)
