"""The speculative cache against plain concatenation: roll-back, ragged rows, windows, the way back to the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_target
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from specdec_hf.buffers import BufferedLayer, RowLengths
from specdec_hf.cache import SpeculativeCache, cannot_roll_back


def states(rows: int, tokens: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values [B, 1, T, 2] that say their own row and slot."""
    keys = (
        torch.arange(start, start + tokens).float()[None, None, :, None]
        + 1000 * torch.arange(rows)[:, None, None, None]
    )
    return keys.expand(rows, 1, tokens, 2).clone(), -keys.expand(rows, 1, tokens, 2).clone()


def test_commit_takes_back_what_a_round_wrote():
    cache = SpeculativeCache(DynamicCache(), 64)
    cache.update(*states(1, 5), 0)
    keys, values = cache.update(*states(1, 4, start=100), 0)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 100, 101, 102, 103] and torch.equal(values, -keys)
    before = cache.layers[0]._keys.data_ptr()
    cache.commit(6)
    keys, _ = cache.update(*states(1, 2, start=200), 0)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 100, 200, 201] and cache.get_seq_length() == 8
    assert cache.layers[0]._keys.data_ptr() == before, "rolling back must not copy the memory"


def test_ragged_rows_write_behind_their_own_end():
    cache = SpeculativeCache(DynamicCache(), 64)
    cache.update(*states(2, 3), 0)
    cache.update(*states(2, 3, start=50), 0)
    cache.commit_rows(torch.tensor([6, 4]), 6, 4)
    keys, _ = cache.update(*states(2, 2, start=70), 0)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 50, 51, 52, 70, 71]
    assert keys[1, 0, :6, 0].tolist() == [1000, 1001, 1002, 1050, 1070, 1071]
    valid = torch.ones(2, 64, dtype=torch.bool)
    valid[1, 0] = False
    cache.commit_rows(torch.tensor([6, 4]), 6, 4)
    mask = cache.ragged_mask(valid, 2, {False: None})[False]
    assert mask.shape == (2, 1, 2, 8)
    assert mask[0, 0].sum(-1).tolist() == [7, 8] and mask[1, 0].sum(-1).tolist() == [4, 5]
    assert mask[1, 0, 0].tolist() == [False, True, True, True, True, False, False, False]
    cache.select_rows(torch.tensor([1]))
    assert cache.layers[0]._keys.shape[0] == 1


@pytest.mark.parametrize("window", [None, 4])
def test_slots_never_written_hold_no_garbage(window):
    """A shorter row's empty slots lie inside the view; a NaN there would survive the mask (0 * NaN)."""
    layer = BufferedLayer(RowLengths(), 8, window)
    layer.update(*states(1, 3))
    assert not layer._keys[:, :, 3:].any() and not layer._values[:, :, 3:].any()
    layer.update(*states(1, 80, start=3))  # beyond the first capacity
    assert layer._keys.isfinite().all()
    if window is None:
        assert layer.length == 83 and not layer._keys[:, :, 83:].any()


@pytest.mark.parametrize("prompt", [3, 90])
def test_sliding_layer_keeps_what_later_queries_see(prompt):
    """Short and long prompts, blocks with roll-back, long enough to drop slots several times."""
    window = 5
    layer = BufferedLayer(RowLengths(), 1000, window)
    layer.update(*states(1, prompt))
    length = prompt
    for block in [4, 1, 6, 2, 3] * 20:
        total, first = layer.get_mask_sizes(block)
        keys, _ = layer.update(*states(1, block, start=length))
        assert keys.shape[2] == total and first + total == length + block
        assert first <= max(length - window + 1, 0), "the first query's window must be there"
        assert keys[0, 0, :, 0].tolist() == list(range(first, length + block))
        length += (block + 1) // 2  # the rest was rejected
        layer.length = length
    assert layer._keys.shape[2] <= max(2 * window + 64, prompt)


def test_growth_keeps_contents():
    layer = BufferedLayer(RowLengths(), 4)
    for start in range(0, 100, 5):
        keys, values = layer.update(*states(2, 5, start=start))
    assert keys[0, 0, :, 0].tolist() == list(range(100)) and torch.equal(values, -keys)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_round_trip_through_the_users_cache(kind):
    """Contents of a user's cache come in, and the committed ones go back in the user's own classes."""
    config = make_target("mistral", num_hidden_layers=2).config
    config.sliding_window = None
    source: Any = DynamicCache() if kind == "dynamic" else StaticCache(config, max_cache_len=32)
    for layer in range(2):
        source.update(*states(1, 4), layer)
    cache = SpeculativeCache(source, 32)
    assert cache.get_seq_length() == 4
    for layer in range(2):
        cache.update(*states(1, 3, start=4), layer)
    cache.commit(6)
    classes = [type(layer) for layer in source.layers]
    back = cache.export(source, 6, [0])
    assert back is source and [type(layer) for layer in back.layers] == classes
    assert int(back.get_seq_length()) == 6
    assert back.layers[1].keys[0, 0, :6, 0].tolist() == list(range(6))


def test_parked_rows_come_back_in_their_places():
    source = DynamicCache()
    cache = SpeculativeCache(source, 32)
    cache.update(*states(3, 4), 0)
    cache.commit_rows(torch.tensor([4, 2, 3]), 4, 2)
    cache.park({1: (1, 2)})
    cache.select_rows(torch.tensor([0, 2]))
    back = cache.export(source, 4, [0, 2])
    assert back.layers[0].keys[:, 0, :, 0].tolist() == [[0, 1, 2, 3], [1000, 1001, 0, 0], [2000, 2001, 2002, 2003]]


def test_caches_that_cannot_serve():
    class Odd(DynamicLayer):
        pass

    odd = DynamicCache()
    odd.layers.append(Odd())
    assert "Odd cannot take back rejected tokens" in cannot_roll_back(odd)
    assert "not a transformers Cache" in cannot_roll_back((1, 2))
    assert cannot_roll_back(DynamicCache()) is None
    with pytest.raises(ValueError, match=r"DynamicCache cannot be used for speculation.*Odd"):
        SpeculativeCache(odd, 8)
