"""Layers of the key/value memory: preallocated buffers, rows of different lengths, sliding windows.

Slot s of a row holds the row's s-th column (left padding included), so rolling back is lowering a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._hf import CacheLayerMixin, LinearAttentionLayer
from .recurrent import copy_states


class RowLengths:
    """Committed slots of each row, shared by all layers of a cache.

    `tensor` is a LongTensor [B], or None while all rows have the same length (then layers count for themselves).
    `floor` is a number of slots that may be gone back to, so that windows are kept for it; None = no such.
    """

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.shortest = 0
        self.floor: int | None = None
        self._slots: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def set(self, tensor: Tensor, shortest: int) -> None:
        self.tensor, self.shortest = tensor, shortest
        self._slots = {}

    def slots(self, added: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Index tensors ([B, 1], [B, added]) of the slots that the next `added` tokens of each row take."""
        key = (added, device)
        if key not in self._slots:
            assert self.tensor is not None
            lengths = self.tensor.to(device)
            rows = torch.arange(lengths.shape[0], device=device)[:, None]
            self._slots[key] = rows, lengths[:, None] + torch.arange(added, device=device)
        return self._slots[key]


class BufferedLayer(CacheLayerMixin):
    """One layer's keys and values in preallocated buffers [B, H, capacity, head_dim].

    Args:
        rows: lengths shared with the other layers of the cache.
        capacity: slots to allocate at first.
        window: size of a sliding window in slots, None for full attention. Slots that no future query can see are
            overwritten once the buffer is full, so memory stays a small multiple of the window.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, rows: RowLengths, capacity: int, window: int | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.window = window
        self.is_sliding = window is not None
        self.capacity = capacity if window is None else min(capacity, 2 * window + 64)
        self.length = 0  # slots written for the longest row, those taken back not counted
        self.offset = 0  # slots dropped in front of the buffer (sliding windows only)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def empty(states: Tensor) -> Tensor:
            # Zeros: a shorter row's slots that were never written lie inside the others' view, and a masked NaN is NaN.
            return states.new_zeros((*states.shape[:2], self.capacity, states.shape[3]))

        self._keys, self._values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new states [B, H, T, head_dim] behind each row's last slot; returns the visible keys and values."""
        added = key_states.shape[-2]
        first = self._first_visible()
        if self._keys is None or self._values is None:
            if self.window is not None and added > self.capacity:
                return self._keep_tail(key_states, value_states)
            self.capacity = max(self.capacity, added)
            self.lazy_initialization(key_states, value_states)
        if self.length - self.offset + added > self.capacity:
            self._make_room(first, added)
        assert self._keys is not None and self._values is not None
        start = self.length - self.offset
        if self.rows.tensor is None:
            self._keys[:, :, start : start + added] = key_states
            self._values[:, :, start : start + added] = value_states
        else:
            rows, slots = self.rows.slots(added, key_states.device)
            slots = slots - self.offset if self.offset else slots
            self._keys[rows, :, slots] = key_states.transpose(1, 2)
            self._values[rows, :, slots] = value_states.transpose(1, 2)
        self.length += added
        visible = slice(first - self.offset, start + added)
        return self._keys[:, :, visible], self._values[:, :, visible]

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy the states at slots `source` to slots `target` (LongTensor [B, S] each; `rows` [B, 1])."""
        if self._keys is None or self._values is None:
            return
        rows, source, target = (t.to(self._keys.device) for t in (rows, source - self.offset, target - self.offset))
        self._keys[rows, :, target] = self._keys[rows, :, source]
        self._values[rows, :, target] = self._values[rows, :, source]

    def _first_visible(self) -> int:
        """The first slot that a query behind the shortest row can see."""
        if self.window is None:
            return 0
        shortest = self.length if self.rows.tensor is None else self.rows.shortest
        if self.rows.floor is not None:
            shortest = min(shortest, self.rows.floor)
        return max(shortest - self.window + 1, self.offset)

    def _keep_tail(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """A prompt longer than a sliding buffer: its queries need all of it once, later ones only the window."""
        assert self.window is not None
        kept = min(self.window, key_states.shape[-2])
        self.lazy_initialization(key_states, value_states)
        assert self._keys is not None and self._values is not None
        self._keys[:, :, :kept] = key_states[:, :, -kept:]
        self._values[:, :, :kept] = value_states[:, :, -kept:]
        self.length = key_states.shape[-2]
        self.offset = self.length - kept
        return key_states, value_states

    def _make_room(self, first: int, added: int) -> None:
        """Drop slots before `first` (none in full attention) and enlarge the buffer if that is not enough."""
        kept = slice(first - self.offset, self.length - self.offset)
        needed = self.length - first + added
        if needed > self.capacity:
            self.capacity = max(needed, self.capacity + self.capacity // 2)

        def moved(buffer: Tensor) -> Tensor:
            if self.capacity == buffer.shape[2]:
                buffer[:, :, : kept.stop - kept.start] = buffer[:, :, kept].clone()
                return buffer
            larger = buffer.new_zeros((*buffer.shape[:2], self.capacity, buffer.shape[3]))
            larger[:, :, : kept.stop - kept.start] = buffer[:, :, kept]
            return larger

        assert self._keys is not None and self._values is not None
        self._keys, self._values = moved(self._keys), moved(self._values)
        self.offset = first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(visible slots, first visible slot) of a forward over `query_length` new tokens."""
        first = self._first_visible()
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the name before 5.20
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Take over cached states [B, H, T, head_dim], the last T of `length` slots."""
        self.capacity = max(self.capacity, keys.shape[2])
        self.lazy_initialization(keys, values)
        assert self._keys is not None and self._values is not None
        self._keys[:, :, : keys.shape[2]] = keys
        self._values[:, :, : values.shape[2]] = values
        self.length, self.offset = length, length - keys.shape[2]

    def states(self, length: int) -> tuple[Tensor, Tensor, int]:
        """Views of keys and values up to slot `length`, and the number of slots missing in front of them."""
        assert self._keys is not None and self._values is not None
        end = length - self.offset
        return self._keys[:, :, :end], self._values[:, :, :end], self.offset

    def select_rows(self, index: Tensor) -> None:
        if self._keys is not None and self._values is not None:
            index = index.to(self._keys.device)
            self._keys, self._values = self._keys.index_select(0, index), self._values.index_select(0, index)


class BufferedRecurrentLayer(LinearAttentionLayer, BufferedLayer):
    """A layer with keys and values in buffers and a recurrent state beside them (Falcon-H1, Zamba 2)."""

    is_compileable = False
    is_croppable = True

    def __init__(self, rows: RowLengths, capacity: int, window: int | None = None, *, source: Any) -> None:
        BufferedLayer.__init__(self, rows, capacity, window)
        LinearAttentionLayer.__init__(self, number_of_states=source.number_of_states)
        copy_states(source, self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # transformers' own layers of this kind tell the two by this: states come by name, keys and values do not.
        (BufferedLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        BufferedLayer.crop(self, tokens_to_remove)
