"""The runner's block forwards against a forward of the whole text: ragged rows, roll-back, positions, released rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_target
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from specdec_hf import _hf
from specdec_hf.cache import SpeculativeCache
from specdec_hf.forward import TargetRunner, must_stay_level
from specdec_hf.targets import TapRecorder


def runner(target: Any, mask: Tensor | None, level: bool = False, **kwargs: Any) -> TargetRunner:
    cache = SpeculativeCache(DynamicCache(config=target.config), 64)
    inputs = {_hf.CACHE_KEY: cache, "use_cache": True, **({} if mask is None else {"attention_mask": mask}), **kwargs}
    return TargetRunner(target, cache, inputs, TapRecorder(target, []), level, 64)


def whole(target: Any, ids: Tensor) -> Tensor:
    """Logits of one row's text without padding, in one plain forward."""
    return target(ids[None]).logits[0]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2"])
@torch.no_grad()
def test_blocks_of_ragged_rows(family):
    """Rows of 6 and 3 tokens (left padding), that accept different numbers, round after round; then one leaves."""
    target = make_target(family, eos_token_id=None)
    torch.manual_seed(3)
    text = torch.randint(3, 96, (2, 64))
    pads = [0, 3]
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :3] = 0
    # as generate() prepares them
    run = runner(target, mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    run.prefill(text[:, :6], GenerationConfig())
    positions, valid, cached = run.prompt_columns()
    assert positions[1, 3:].tolist() == [0, 1, 2] and valid.sum(1).tolist() == [6, 3] and cached == [0, 0]
    lengths, rows = [7, 7], [0, 1]
    for width, gained in ((3, [4, 1]), (2, [1, 3]), (4, [2, 5]), (0, [1, 1]), (3, [3, 1]), (2, [3, 2])):
        outputs, positions, tokens = run.block(text[rows], lengths, width)
        for place, row in enumerate(rows):
            end = lengths[place] + width
            expected = whole(target, text[row, pads[row] : end])[-width - 1 :]
            torch.testing.assert_close(outputs.logits[place], expected, atol=2e-4, rtol=1e-4)
            assert tokens[place].tolist() == text[row, lengths[place] - 1 : end].tolist()
            assert positions[place].tolist() == list(range(lengths[place] - 1 - pads[row], end - pads[row]))
        run.commit(gained)
        lengths = [length + new for length, new in zip(lengths, gained, strict=True)]
        if lengths[0] > 15 and len(rows) == 2:
            run.select_rows([1])
            rows, lengths = [1], lengths[1:]
            break
    outputs, positions, _ = run.block(text[rows], lengths, 2)
    expected = whole(target, text[1, 3 : lengths[0] + 2])[-3:]
    torch.testing.assert_close(outputs.logits[0], expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_level_rows_and_given_positions():
    target = make_target(eos_token_id=None)
    text = torch.randint(3, 96, (2, 30))
    run = runner(target, None, level=True, position_ids=torch.arange(10, 15)[None])
    run.prefill(text[:, :5], GenerationConfig())
    outputs, positions, _ = run.block(text, [6, 6], 2)
    assert positions.tolist() == [[15, 16, 17]] * 2
    expected = target(text[:, :8], position_ids=torch.arange(10, 18)[None]).logits[:, -3:]
    torch.testing.assert_close(outputs.logits, expected, atol=2e-4, rtol=1e-4)
    run.commit([2, 2])
    outputs, positions, _ = run.block(text, [8, 8], 1)
    assert positions[0].tolist() == [17, 18] and run.filled == [7, 7]


def test_must_stay_level():
    target = make_target()
    assert not must_stay_level(target)
    target.config._attn_implementation = "flash_attention_2"
    assert must_stay_level(target)
