"""Coupled sampling: noise that depends on (seed, row, position, token) alone, so the text depends on no drafter.

Gumbel-max: argmax(log p + g) with independent standard Gumbel noise g is an exact draw from p (Gumbel 1954; Maddison et
al. 2014, arXiv 1411.0030). With the noise fixed per position, target and draft choose with the same noise, a drafted
token is kept if and only if it is the target's choice, and every committed token is the target's choice: greedy
decoding on noisy scores. Same seed, same text: with any drafter, any number of drafted tokens, any batch, or nothing
drafted.

The noise is SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators") read at counter `token`
of a stream whose start is hashed from (seed, row, position): integers only, so the bits are the same on every device
and in every version of torch. On one CPU thread 8 positions of 49,152 (151,936) tokens take 3.4 ms (10 ms), as long as
the softmax and the running sum that residual sampling needs instead; a `torch.Generator` seeded for each position takes
2.7 times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tree import TokenTree

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEPS = ((30, _MIX_1), (27, _MIX_2), (31, None))
#: Numbers hashed at once on a CPU: as many as its inner cache holds.
_CHUNK = 2**16


class CoupledNoise:
    """Standard Gumbel noise for every row, position and token of one call.

    Args:
        seeds: an int, with which row r reads stream (seed, r); or a list with one int per row, with which row r reads
            stream (seeds[r], 0), the one that a call with that row alone and that seed reads.
        batch_size: rows B.
        vocab_size: V.
        device: where the noise is needed.

    Raises:
        ValueError: a list whose length is not B.
    """

    def __init__(self, seeds: int | Sequence[int], batch_size: int, vocab_size: int, device: torch.device) -> None:
        if not isinstance(seeds, int) and len(seeds) != batch_size:
            raise ValueError(
                f"seed has {len(seeds)} entries for {batch_size} rows: pass one integer, or a list with exactly one "
                "per row (after num_return_sequences)."
            )
        pairs = [(seeds, row) for row in range(batch_size)] if isinstance(seeds, int) else [(s, 0) for s in seeds]
        self._streams = [_mixed(_mixed(seed) ^ row) for seed, row in pairs]
        self._counters = torch.arange(vocab_size, device=device) * _signed(_GOLDEN)

    def block(self, numbers: list[int], positions: list[int], width: int) -> Tensor:
        """Noise for `width` positions in a row of each row.

        Args:
            numbers: the call's row number of each row.
            positions: per row, the first position: the number of tokens (padding not counted) before it.
            width: positions S.

        Returns:
            float32 [B, S, V].
        """
        keys = [
            _signed(_mixed(self._streams[number] ^ _mixed(position + step)))
            for number, position in zip(numbers, positions, strict=True)
            for step in range(width)
        ]
        device, vocab_size = self._counters.device, self._counters.shape[0]
        starts = torch.tensor(keys, dtype=torch.long, device=device)[:, None]
        rows = len(keys) if device.type != "cpu" else max(_CHUNK // vocab_size, 1)
        noise = torch.empty(len(keys), vocab_size, device=device)
        for first in range(0, len(keys), rows):
            noise[first : first + rows] = _gumbel(starts[first : first + rows] + self._counters)
        return noise.view(len(numbers), width, vocab_size)


def noise_of_block(noise: Tensor, width: int, tree: TokenTree | None = None) -> Tensor:
    """Noise [B, width + 1, V] for the places of a block, from noise [B, S, V] by position; in a tree, by depth."""
    if tree is None:
        return noise[:, : width + 1]
    return noise.gather(1, tree.steps[:, :, None].expand(-1, -1, noise.shape[2]))


def _gumbel(bits: Tensor) -> Tensor:
    """float32 Gumbel noise from int64 counters, which are overwritten.

    -log(-log1p(-u)) is exact where u is small, which is where the noise is large and decides.
    """
    part = torch.empty_like(bits)
    for shift, factor in _STEPS:
        torch.bitwise_right_shift(bits, shift, out=part)
        bits ^= part.bitwise_and_((1 << (64 - shift)) - 1)  # a logical shift: int64 would drag its sign along
        if factor is not None:
            bits *= _signed(factor)
    torch.bitwise_right_shift(bits, 11, out=part)
    uniforms = part.bitwise_and_((1 << 53) - 1).to(torch.float32).add_(0.5).mul_(2.0**-53)
    return uniforms.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def _mixed(value: int) -> int:
    """SplitMix64's output for a counter, as an unsigned 64-bit integer."""
    value = (value + _GOLDEN) % 2**64
    for shift, factor in _STEPS:
        value ^= value >> shift
        value = value if factor is None else value * factor % 2**64
    return value


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
