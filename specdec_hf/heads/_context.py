"""Cached keys and values of the committed tokens, for a draft head. It knows lengths and copies, no model.

Letters: L draft layers, B rows, C capacity, Hkv key/value heads, hd their size, K block size, T tokens of one call.
"""

from __future__ import annotations

import torch


class DraftContext:
    """Preallocated context keys and values; rows are left-aligned and may be ragged.

    Tokens enter once, when they are committed; a block's own keys are written after them as scratch and are overwritten
    by the next call. Nothing here waits for the device, so the longest row is tracked on the host.

    Attributes:
        keys, values: [L, B, C, Hkv, hd] viewed as [L, B, Hkv, C, hd].
        lengths: [B] int64, tokens held by each row.
        max_length: the longest row, or an upper bound of it where the caller did not say.
        uniform: every row holds exactly ``max_length`` tokens (then no mask is needed).
    """

    __slots__ = ("keys", "lengths", "max_length", "uniform", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.lengths = torch.zeros(keys.shape[1], dtype=torch.int64, device=keys.device)
        self.max_length = 0
        self.uniform = True

    @property
    def batch_size(self) -> int:
        """B."""
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """C, tokens a row can hold before the buffers grow (a block's scratch included)."""
        return self.keys.shape[3]

    def reserve(self, total: int) -> None:
        """Room for ``total`` tokens a row; grows by doubling, so that a token is copied O(1) times on average."""
        if total <= self.capacity:
            return
        grown = max(total, 2 * self.capacity)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((*old.shape[:3], grown, old.shape[4]))
            new[:, :, :, : self.max_length] = old[:, :, :, : self.max_length]
            setattr(self, name, new)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, destination: torch.Tensor | None) -> None:
        """Put keys and values [B, T, Hkv, hd] of one layer after the context.

        Args:
            destination: [B, T] places in the buffers, or ``None``: right after ``max_length``, for uniform rows.
        """
        if destination is None:
            end = self.max_length + keys.shape[1]
            self.keys[layer][:, :, self.max_length : end] = keys.transpose(1, 2)
            self.values[layer][:, :, self.max_length : end] = values.transpose(1, 2)
        else:
            rows = torch.arange(self.batch_size, device=keys.device)[:, None]
            self.keys[layer][rows, :, destination] = keys
            self.values[layer][rows, :, destination] = values

    def advance(self, steps: int, counts: torch.Tensor | None, max_length: int | None) -> None:
        """Count T new tokens a row, or ``counts`` [B] of them; ``max_length`` is the exact longest row, if known."""
        if counts is None:
            self.lengths += steps
            self.max_length += steps
            return
        self.lengths += counts
        self._set_longest(max_length, self.max_length + steps)

    def select_rows(self, index: torch.Tensor, max_length: int | None = None) -> DraftContext:
        """Keep rows ``index`` [B'] in that order (rows that finished leave; beams or copies may repeat one).

        Args:
            index: int64 row numbers.
            max_length: exact longest remaining row, if the caller knows it (with one row left, it spares the mask).

        Returns:
            Itself.
        """
        index = index.to(self.keys.device)
        self.keys, self.values = self.keys.index_select(1, index), self.values.index_select(1, index)
        self.lengths = self.lengths.index_select(0, index)
        if not self.uniform:
            self._set_longest(max_length, self.max_length)
        return self

    def rollback(self, length: int | torch.Tensor, max_length: int | None = None) -> None:
        """Forget tokens at the end of the rows.

        Args:
            length: tokens that every row keeps, or [B] int64 of them.
            max_length: the exact longest row when ``length`` is a tensor.

        Raises:
            ValueError: ``length`` is negative or more than what is held (checked for the int only: no device wait).
        """
        if isinstance(length, int):
            if not 0 <= length <= self.max_length:
                raise ValueError(f"length={length}: it must be 0 to {self.max_length}, the tokens held; pass fewer")
            self.lengths.fill_(length) if self.uniform else self.lengths.clamp_(max=length)
            self.max_length = length
            return
        self.lengths = torch.minimum(self.lengths, length.to(self.lengths))
        self._set_longest(max_length, self.max_length)

    def reset(self) -> None:
        """Forget all tokens and keep the memory."""
        self.lengths.zero_()
        self.max_length, self.uniform = 0, True

    def _set_longest(self, exact: int | None, bound: int) -> None:
        self.max_length = bound if exact is None else exact
        self.uniform = self.batch_size == 1 and exact is not None
