"""Key/value memory that a speculative round can write to and take back without copying it.

`SpeculativeCache` is a transformers `Cache` whose layers write into preallocated buffers. Slot s of a row holds the
row's s-th column (left padding included), so rolling back is lowering a number, rows of a batch may have different
lengths, and sliding windows count slots exactly as they do in plain decoding. Layers of the user's cache are taken in
once, and the result is handed back in the user's own layer classes. Knows nothing of drafting.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._hf import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from .buffers import BufferedLayer, BufferedRecurrentLayer, RowLengths
from .recurrent import copy_states, is_recurrent, new_layer, put_back, saved_states
from .recurrent import select_rows as select_state_rows

#: Slots allocated beyond the prompt at first; the buffer grows by half when they are used up.
_FIRST_RESERVE = 1024
_CLASSES = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
_RECURRENT = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class SpeculativeCache(DynamicCache):
    """A cache for one `generate()` call.

    Args:
        source: the cache that `generate` prepared or the user passed in; its contents are copied, once.
        capacity: slots the call can need at most (prompt + new tokens + one block).
    """

    def __init__(self, source: Cache, capacity: int) -> None:
        reason = cannot_roll_back(source)
        if reason is not None:
            raise ValueError(f"{type(source).__name__} cannot be used for speculation: {reason}.")
        self.rows = RowLengths()
        self._parked: dict[int, list[tuple[Tensor, Tensor, int, int]]] = {}
        self._saved: list[Any] = []
        self.on_state_update: Any = None  # called with a layer's index when its recurrent state is about to change
        cached = int(source.get_seq_length()) if source.layers else 0
        first = min(capacity, cached + _FIRST_RESERVE)
        make = partial(BufferedLayer, self.rows, first)
        if source.layers:
            Cache.__init__(self, layers=[_adopted(layer, make) for layer in source.layers])
        else:
            Cache.__init__(self, layer_class_to_replicate=make)

    @property
    def buffered(self) -> list[BufferedLayer]:
        """The layers that hold states of their own."""
        return [layer for layer in self.layers if isinstance(layer, BufferedLayer)]

    def lend(self, layers: int, shortest: int) -> SpeculativeCache:
        """A cache of the first layers alone, on the same memory, for tokens that are read ahead of the other layers.

        Args:
            layers: how many; all layers must exist, so after the prefill.
            shortest: slots of the shortest row, that sliding windows are kept for until `take_back`.
        """
        part: SpeculativeCache = object.__new__(SpeculativeCache)
        part.rows, part._parked, part._saved, part.on_state_update = RowLengths(), {}, [], None
        part.rows.floor = shortest
        Cache.__init__(part, layers=self.layers[:layers])
        part._length = self.get_seq_length()
        for layer in part.buffered:
            layer.rows = part.rows
        return part

    def take_back(self, part: SpeculativeCache, length: int) -> None:
        """End what `lend` began: the longest row has `length` slots again; what was written behind stays written."""
        part.commit(length)
        for layer in part.buffered:
            layer.rows = self.rows

    @property
    def recurrent(self) -> list[int]:
        """Indices of the layers that keep a recurrent state."""
        return [i for i, layer in enumerate(self.layers) if is_recurrent(layer)]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.on_state_update is not None:
            self.on_state_update(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.on_state_update is not None:
            self.on_state_update(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row; of a part without attention layers, those before the round."""
        if self.buffered or not self.layers:
            return super().get_seq_length(layer_idx)
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As in transformers; a part without attention layers answers as one full-attention layer would."""
        if self.buffered or not self.layers:
            return super().get_mask_sizes(query_length, layer_idx)
        return self._length + query_length, 0

    def save_states(self) -> None:
        """Remember all recurrent states, for `restore_states`."""
        self._saved = [(self.layers[i], saved_states(self.layers[i])) for i in self.recurrent]

    def forget_states(self) -> None:
        """Set all recurrent states to zero, as if nothing had been read."""
        for layer, states in self._saved:
            put_back(layer, [{i: None if s is None else s * 0 for i, s in held.items()} for held in states])

    def restore_states(self) -> None:
        """Put the recurrent states back that `save_states` remembered; keys and values stay."""
        for layer, states in self._saved:
            put_back(layer, states)
        self._saved = []

    def commit(self, length: int) -> None:
        """All rows now have `length` slots; what a round wrote behind them is taken back."""
        self._length = length
        for layer in self.buffered:
            layer.length = length

    def commit_rows(self, lengths: Tensor, longest: int, shortest: int) -> None:
        """Row b now has `lengths[b]` slots (LongTensor [B]; the two ints are its maximum and minimum)."""
        self.rows.set(lengths, shortest)
        self.commit(longest)

    def keep_path(self, lengths: Tensor, columns: Tensor) -> None:
        """Of the block just written, bring one path of columns together behind the anchor, where `commit` keeps it.

        Args:
            lengths: LongTensor [B], slots of each row before the block: the anchor's slot.
            columns: LongTensor [B, S], column of the block (0 = the anchor) that is to stand at column 1, 2, ... S.
        """
        rows = torch.arange(columns.shape[0], device=columns.device)[:, None]
        target = lengths[:, None] + torch.arange(1, columns.shape[1] + 1, device=columns.device)
        for layer in self.buffered:
            layer.move(rows, lengths[:, None] + columns, target)

    def tree_mask(
        self, valid: Tensor, lengths: Tensor, steps: Tensor, ancestors: Tensor, windows: dict[bool, int | None]
    ) -> dict[bool, Tensor]:
        """Attention masks for trees behind each row's last slot.

        A node sees the row's committed slots, its ancestors and itself. A sliding window counts the slots that plain
        decoding would have used: as many as there are steps between the anchor and the node, not places in the block.

        Args:
            valid: bool [B, S], False at padding slots; S at least the longest row plus the block.
            lengths: LongTensor [B], slots of each row.
            steps: LongTensor [B, C], each column's distance from the anchor (column 0).
            ancestors: bool [B, C, C], True where a column (second) sees another one (last) of the block.
            windows: as in `ragged_mask`.

        Returns:
            By `is_sliding`: bool [B, 1, C, visible slots], True = attend.
        """
        added = steps.shape[1]
        queries = (lengths[:, None] + steps)[:, :, None]
        places = lengths[:, None] + torch.arange(added, device=valid.device)
        masks: dict[bool, Tensor] = {}
        for is_sliding, window in windows.items():
            own = [layer for layer in self.buffered if layer.is_sliding == is_sliding]
            visible, first = (own or self.buffered)[0].get_mask_sizes(added)
            slots = torch.arange(first, first + visible, device=valid.device)
            counted = slots.expand(lengths.shape[0], -1).clone()  # the slot that plain decoding would have used
            counted.scatter_(1, places - first, lengths[:, None] + steps)
            mask = (slots < lengths[:, None, None]) & valid[:, None, first : first + visible]
            mask = mask.expand(-1, added, -1).scatter(2, (places - first)[:, None].expand(-1, added, -1), ancestors)
            if window is not None:
                mask = mask & (counted[:, None] > queries - window)
            masks[is_sliding] = mask[:, None]
        return masks

    def can_return_to(self, length: int) -> bool:
        """Whether all rows can be cut to `length` slots: sliding layers must still hold the window before it."""
        return length <= self.get_seq_length() and all(
            layer.offset == 0 or (layer.window is not None and length - layer.window + 1 >= layer.offset)
            for layer in self.buffered
        )

    def return_to(self, length: int) -> None:
        """Cut all rows to `length` slots, whatever lengths they had."""
        self.rows.tensor = None
        self.commit(length)

    def ragged_mask(self, valid: Tensor, added: int, windows: dict[bool, int | None]) -> dict[bool, Tensor]:
        """Attention masks for `added` new tokens of rows that have different lengths.

        Args:
            valid: bool [B, S], False at padding slots; S at least the longest row plus `added`.
            windows: by `is_sliding`, the window in slots of each kind of attention that the model has. A cache made
                without the model's configuration holds all slots in every layer, so the layers cannot tell.

        Returns:
            By `is_sliding`: bool [B, 1, added, visible slots], True = attend.
        """
        assert self.rows.tensor is not None
        queries = self.rows.slots(added, valid.device)[1][:, :, None]
        masks: dict[bool, Tensor] = {}
        for is_sliding, window in windows.items():
            own = [layer for layer in self.buffered if layer.is_sliding == is_sliding]
            visible, first = (own or self.buffered)[0].get_mask_sizes(added)
            slots = torch.arange(first, first + visible, device=valid.device)
            mask = (slots <= queries) & valid[:, None, first : first + visible]
            if window is not None:
                mask &= slots > queries - window
            masks[is_sliding] = mask[:, None]
        return masks

    def park(self, rows: dict[int, tuple[int, int]]) -> None:
        """Keep the states of rows that are about to leave: {row's number in the call: (present row, length)}."""
        for number, (row, length) in rows.items():
            states = [layer.states(length) for layer in self.buffered]
            self._parked[number] = [(k[row].clone(), v[row].clone(), gone, length) for k, v, gone in states]

    def select_rows(self, index: Tensor) -> None:
        """Keep only the rows `index` (LongTensor) of the batch, in that order."""
        for layer in self.buffered:
            layer.select_rows(index)
        for place in self.recurrent:
            select_state_rows(self.layers[place], index)

    def export(self, destination: Cache, length: int, numbers: list[int]) -> Cache:
        """Write the committed states into `destination`, layer by layer, in its own classes.

        Args:
            destination: the cache that this one was made from.
            length: slots of the longest row.
            numbers: the call's row number of each row still in the batch.
        """
        layers = iter(destination.layers)
        for place, layer in enumerate(self.buffered):
            if layer._keys is None:
                continue
            keys, values, missing = self._assembled(place, layer, length, numbers)
            own = next((own for own in layers if isinstance(own, _CLASSES)), None)
            if own is None:
                own = DynamicLayer()
                destination.layers.append(own)
            _write_back(own, keys, values, length, missing)
        for place in self.recurrent:
            copy_states(self.layers[place], destination.layers[place])
        return destination

    def _assembled(
        self, place: int, layer: BufferedLayer, length: int, numbers: list[int]
    ) -> tuple[Tensor, Tensor, int]:
        keys, values, missing = layer.states(length)
        if not self._parked:
            return keys, values, missing
        gone = max([missing, *(rows[place][2] for rows in self._parked.values())])
        total = len(self._parked) + len(numbers)
        full = [states.new_zeros(total, states.shape[1], length - gone, states.shape[3]) for states in (keys, values)]
        for row, number in enumerate(numbers):
            full[0][number], full[1][number] = keys[row, :, gone - missing :], values[row, :, gone - missing :]
        for number, rows in self._parked.items():
            k, v, dropped, own = rows[place]
            for whole, part in zip(full, (k, v), strict=True):
                # A row that waited for others may hold one slot more than the cache that is handed back.
                whole[number, :, : max(own - gone, 0)] = part[:, gone - dropped : length - dropped]
        return full[0], full[1], gone


def cannot_roll_back(cache: Any) -> str | None:
    """Why a cache cannot serve speculation, in words; None if it can."""
    if not isinstance(cache, Cache):
        return f"it is a {type(cache).__name__}, not a transformers Cache"
    if getattr(cache, "offloading", False):
        return "its layers are offloaded to another device between forwards"
    later = getattr(cache, "layer_class_to_replicate", None)  # what an empty cache will make its layers of
    for kind in (*map(type, cache.layers), *([later] if isinstance(later, type) else [])):
        if kind not in (*_CLASSES, *_RECURRENT) and not (DummyLayer is not None and issubclass(kind, DummyLayer)):
            return f"its layer {kind.__name__} cannot take back rejected tokens"
    if cache.layers and all(is_recurrent(layer) and not isinstance(layer, DynamicLayer) for layer in cache.layers):
        return "all its layers are recurrent, so none counts the tokens"
    return None


def _adopted(layer: Any, make: Any) -> Any:
    if is_recurrent(layer):
        if not isinstance(layer, DynamicLayer):
            return new_layer(layer)
        make = partial(BufferedRecurrentLayer, *make.args, source=layer)
    if not isinstance(layer, _CLASSES):
        return layer  # shares another layer's keys, holds none
    static = isinstance(layer, StaticLayer)
    if isinstance(layer, StaticSlidingWindowLayer):
        # its size is min(window, max length): below the window nothing ever leaves it
        buffered = make(window=layer.max_cache_len)
    else:
        buffered = make(window=getattr(layer, "sliding_window", None) if layer.is_sliding else None)
    length = int(layer.get_seq_length())
    if layer.is_initialized and length:
        held = min(length, layer.keys.shape[2]) if static else layer.keys.shape[2]
        buffered.fill(layer.keys[:, :, :held], layer.values[:, :, :held], length)
    return buffered


def _write_back(own: Any, keys: Tensor, values: Tensor, length: int, missing: int) -> None:
    """Set a transformers layer to `keys`, `values`: the last T of `length` slots."""
    if isinstance(own, StaticLayer):
        if not own.is_initialized:
            own.lazy_initialization(keys, values)
        held = min(length, own.max_cache_len)
        own.keys[:, :, :held] = keys[:, :, length - missing - held :]
        own.values[:, :, :held] = values[:, :, length - missing - held :]
        own.cumulative_length.fill_(length)
        if isinstance(own, StaticSlidingWindowLayer):
            own.cumulative_length_int = length
        return
    if not own.is_initialized:
        own.lazy_initialization(keys, values)
    if isinstance(own, DynamicSlidingWindowLayer):
        own.cumulative_length = length
        tail = own.sliding_window - 1
        keys, values = keys[:, :, max(keys.shape[2] - tail, 0) :], values[:, :, max(values.shape[2] - tail, 0) :]
    own.keys, own.values = keys, values
