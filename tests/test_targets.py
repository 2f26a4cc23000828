"""Target families: where their layers are, taps against transformers' own hidden states, masks."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, make_target

from specdec_hf.targets import (
    TapRecorder,
    accepts_argument,
    decoder_layers,
    dense_mask,
    mask_windows,
    takes_ragged_masks,
    token_types,
)


def hook_count(target: torch.nn.Module) -> int:
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in decoder_layers(target))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_taps_are_transformers_hidden_states(family):
    """Tap i is hidden_states[i + 1], tap -1 the embedding output, for every family."""
    target = make_target(family)
    assert len(decoder_layers(target)) == 4
    ids = torch.randint(3, 96, (2, 5))
    expected = target(ids, output_hidden_states=True).hidden_states
    hooks = hook_count(target)  # transformers leaves its own behind after output_hidden_states=True
    recorder = TapRecorder(target, [2, -1, 0])
    with recorder:
        outputs = target(ids)
        taps = recorder.collect(outputs)
        for tap, layer in zip(taps, [2, -1, 0], strict=True):
            torch.testing.assert_close(tap, expected[layer + 1])
        target(ids[:, :3])
        target(ids[:, 3:])
        assert recorder.collect(outputs)[0].shape[1] == 5, "chunks are joined"
        with pytest.raises(RuntimeError, match=r"decoder layer 2 of .* did not run"):
            recorder.collect(outputs)
    assert hook_count(target) == hooks
    assert recorder.forward_kwargs == {}


def test_hooks_leave_also_after_an_error():
    target = make_target()
    with pytest.raises(ZeroDivisionError), TapRecorder(target, [0, 1]):
        raise ZeroDivisionError
    assert hook_count(target) == 0


def test_layers_not_found():
    target = make_target()
    target.config.num_hidden_layers = 9
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no ModuleList of 9 decoder layers.*needs no taps"):
        decoder_layers(target)


def test_which_targets_take_ragged_masks():
    assert all(takes_ragged_masks(make_target(family)) for family in FAMILIES)
    target = make_target()
    target.config._attn_implementation = "flash_attention_2"
    assert not takes_ragged_masks(target)


def test_windows_of_a_family():
    assert mask_windows(make_target("llama")) == {False: None}
    assert mask_windows(make_target("mistral")) == {True: 16}
    assert mask_windows(make_target("gemma3_text", layer_types=["sliding_attention"] * 3 + ["full_attention"])) == {
        True: 16, False: None
    }  # fmt: skip


def test_dense_masks():
    mask = torch.tensor([[[[True, False]]]])
    target = make_target()
    assert dense_mask(target, {False: mask}) is mask
    both = dense_mask(target, {False: mask, True: ~mask})
    assert both["full_attention"] is mask and torch.equal(both["sliding_attention"], ~mask)
    target.config._attn_implementation = "eager"
    assert dense_mask(target, {False: mask}).flatten().tolist() == [0.0, torch.finfo(torch.float32).min]


def test_token_types_and_arguments():
    types = torch.tensor([[0, 0, 1]])
    made = token_types({"token_type_ids": types, "mm_token_type_ids": types, "other": types}, 2)
    assert made["token_type_ids"].tolist() == [[1, 1]] and made["mm_token_type_ids"].tolist() == [[0, 0]]
    assert len(made) == 2
    target = make_target()
    assert accepts_argument(target, "logits_to_keep") and not accepts_argument(target, "nonsense")
