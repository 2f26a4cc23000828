"""Targets that read images: the picture is in the prefill, what is drafted and verified is text."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from conftest import SMALL
from harness import PAD, STRATEGIES, assistant, compare
from transformers import AutoConfig, AutoModelForImageTextToText

from specdec_hf import disable_speculation, enable_speculation, last_speculation, speculative_decoding
from specdec_hf._hf import CACHE_KEY

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)
IMAGE = 90
SETTINGS = {"max_new_tokens": 18, "eos_token_id": None}
_TEXT = {**SMALL, "num_hidden_layers": 2, "eos_token_id": None}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QWEN = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {  # three rotary positions a token, and fewer positions than tokens behind an image
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "vision_config": {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
        **_QWEN_IDS,
    },
    "qwen3_5": {  # the same with recurrent layers
        "text_config": {
            **_TEXT,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {**_ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
        },
        "vision_config": {**_QWEN, "num_position_embeddings": 16},
        **_QWEN_IDS,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "image_seq_length": 16,
    },
    "gemma3": {  # sliding windows, and attention in both directions inside an image
        "text_config": {
            **_TEXT,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
            "model_type": "gemma3_text",
        },
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "image_token_index": IMAGE,
        "boi_token_index": 92,
        "eoi_token_index": 93,
        "mm_tokens_per_image": 4,
    },
}


@functools.cache
def picture_target(family: str) -> Any:
    config = AutoConfig.for_model(family, **FAMILIES[family], pad_token_id=PAD, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
        model.lm_head.weight.mul_(3.0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    return enable_speculation(model)


def pictures(family: str, batch: int, seed: int = 5) -> dict[str, torch.Tensor]:
    """What a processor gives for one image a row; the second row is shorter and padded."""
    held = 16 if family == "llava" else 4
    rows = [[5 + row, 6, 92, *[IMAGE] * held, 93, 7, 8 + row, 9][row == 1 :] for row in range(batch)]
    ids = torch.tensor([[PAD] * (held + 7 - len(row)) + row for row in rows])
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    if family.startswith("qwen"):
        inputs["pixel_values"] = torch.randn(16 * batch, 3 * 2 * 4 * 4, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * batch)
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
        return inputs
    inputs["pixel_values"] = torch.randn(batch, 3, 16, 16, generator=generator)
    if family == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return inputs


@pytest.mark.parametrize(("batch", "agreement"), [(1, "sometimes"), (3, "always")])
@pytest.mark.parametrize("family", FAMILIES)
def test_images_in_the_prompt(strategy: str, family: str, batch: int, agreement: str) -> None:
    model, inputs = picture_target(family), pictures(family, batch)
    outcome = compare(model, lambda: {**inputs, **SETTINGS}, strategy, head=assistant(strategy, model, agreement))
    assert outcome.stats.accepted > 10
    blank = {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}
    assert model.generate(**blank, **SETTINGS, do_sample=False).tolist() != outcome.plain.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_end_early_and_several_answers(strategy: str, family: str) -> None:
    model, inputs = picture_target(family), pictures(family, 2)
    text = model.generate(**inputs, **SETTINGS, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    outcome = compare(
        model,
        lambda: {**inputs, **sampling, "max_new_tokens": 18, "eos_token_id": [int(text[0, 3]), int(text[1, 8])]},
        strategy,
        head=assistant(strategy, model, "sometimes"),
    )
    assert outcome.speculative.shape[0] == 4
    assert outcome.stats.drafted > 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_a_second_turn_about_the_image(strategy: str, family: str) -> None:
    model, inputs = picture_target(family), pictures(family, 1)
    head = assistant(strategy, model, "sometimes")
    first = compare(model, lambda: {**inputs, **SETTINGS, "return_dict_in_generate": True}, strategy, head=head)
    ids = torch.cat((first.plain.sequences, torch.tensor([[11, 12, 13]])), dim=1)
    caches = iter([first.plain[CACHE_KEY], first.speculative[CACHE_KEY]])
    following: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.startswith("qwen"):
        following |= {"image_grid_thw": inputs["image_grid_thw"], "mm_token_type_ids": (ids == IMAGE).int()}
    second = compare(model, lambda: {**following, **SETTINGS, CACHE_KEY: next(caches)}, strategy, head=head)
    assert second.stats.drafted > 0


@pytest.mark.parametrize("family", ["llava"])
def test_images_as_embeddings(strategy: str, family: str) -> None:
    """Merged by the caller: what the model makes of text and picture together goes in as ``inputs_embeds``."""
    model, inputs = picture_target(family), pictures(family, 1)
    ids = inputs["input_ids"]
    embeds = model.get_input_embeddings()(ids.clamp(max=IMAGE - 1)).detach()
    features = model.get_image_features(inputs["pixel_values"])
    features = getattr(features, "pooler_output", features)
    embeds[ids == IMAGE] = torch.cat(list(features)).reshape(-1, embeds.shape[-1]).detach()
    arguments = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    outcome = compare(model, lambda: {**arguments, **SETTINGS}, strategy, head=assistant(strategy, model))
    if strategy != "draft_model":  # which cannot read embeddings, and says so
        assert outcome.stats.drafted > 0


def test_a_model_that_was_not_touched(strategy: str) -> None:
    model, inputs = picture_target("qwen2_5_vl"), pictures("qwen2_5_vl", 1)
    head = assistant(strategy, model)
    expected = model.generate(**inputs, **SETTINGS, do_sample=False)
    try:
        loop = speculative_decoding(head)
        result = disable_speculation(model).generate(**inputs, **SETTINGS, do_sample=False, custom_generate=loop)
    finally:
        enable_speculation(model)
    assert result.tolist() == expected.tolist()
    assert last_speculation(model).drafted > 0
