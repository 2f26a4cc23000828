"""Caches: every kind that can take back tokens, chat turns that pass one on, and what happens with the other kinds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import (
    STRATEGIES,
    VOCAB,
    assistant,
    caught,
    compare,
    fresh_target,
    padded_prompt,
    prompt,
    shared_assistant,
    target,
)
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec_hf import drafters, last_speculation
from specdec_hf._hf import CACHE_KEY
from specdec_hf.drafters.base import Drafter

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)
KINDS = ("none", "dynamic", "dynamic_config", "static", "static_object")
WINDOWED = ("llama", "mistral", "gemma3_text")


def cache_arguments(kind: str, model: Any, length: int = 64) -> dict[str, Any]:
    return {
        "none": dict,
        "dynamic": lambda: {CACHE_KEY: DynamicCache()},
        "dynamic_config": lambda: {CACHE_KEY: DynamicCache(config=model.config)},
        "static": lambda: {"cache_implementation": "static"},
        "static_object": lambda: {CACHE_KEY: StaticCache(config=model.config, max_cache_len=length)},
    }[kind]()


@contextmanager
def recorded_drafts(strategy: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The tokens of every proposal made inside, whatever the strategy, without rows that draft nothing.

    A row that has ended waits for the others where a cache is handed back, and leaves at once where not.
    """
    cls, drafts = drafters.drafter_class(strategy), []
    original = cls.propose

    def propose(self: Any, request: Any) -> Any:
        proposal = original(self, request)
        drafts.append([row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.lengths, strict=True) if n])
        return proposal

    with monkeypatch.context() as patch:
        patch.setattr(cls, "propose", propose)
        yield drafts


def untaught(strategy: str, model: Any) -> Any:
    """An assistant whose drafts depend on its weights and on all of its context, and on nothing else."""
    return assistant(strategy, model)


# -- one call ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", WINDOWED)
def test_each_kind_of_cache(strategy: str, family: str, kind: str, batch: int) -> None:
    model, inputs = target(family, seed=1), padded_prompt(batch, 12, seed=3)
    compare(model, lambda: {**inputs, "max_new_tokens": 18, **cache_arguments(kind, model)}, strategy, "sometimes")


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:.*past_key_values")
def test_both_names_of_the_argument(strategy: str, name: str) -> None:
    if name == "cache" != CACHE_KEY:
        pytest.skip("this transformers has the old name only")
    caches: list[DynamicCache] = []

    def call() -> dict[str, Any]:
        caches.append(DynamicCache())
        return {"input_ids": prompt(), "max_new_tokens": 9, name: caches[-1]}

    compare(target(), call, strategy)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 9 + 9 - 1


@pytest.mark.parametrize("kind", ["dynamic", "dynamic_config", "static_object"])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_users_cache_is_filled_in_place_as_plain_fills_it(strategy: str, family: str, kind: str) -> None:
    model, made = target(family, seed=2), []

    def call() -> dict[str, Any]:
        made.append(cache_arguments(kind, model))
        return {"input_ids": prompt(1, 11), "max_new_tokens": 14, **made[-1]}

    compare(model, call, strategy, "sometimes")
    plain, ours = (kwargs[CACHE_KEY] for kwargs in made)
    assert ours.get_seq_length() == plain.get_seq_length()
    for a, b in zip(plain.layers, ours.layers, strict=True):
        assert type(a) is type(b)
        end = slice(None) if kind != "static_object" else slice(0, min(int(plain.get_seq_length()), a.keys.shape[2]))
        torch.testing.assert_close(b.keys[:, :, end], a.keys[:, :, end], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(b.values[:, :, end], a.values[:, :, end], atol=1e-4, rtol=1e-4)


# -- chat turns --------------------------------------------------------------------------------------------------------


def second_turn(first: Any, inputs: dict[str, Tensor], eos: list[int], seed: int = 9) -> dict[str, Any]:
    """The inputs of a turn that follows: all tokens so far and a new message; pads behind ended rows are masked."""
    ids = first.sequences
    batch, width = inputs["input_ids"].shape
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(ids[:, width:])), dim=1)
    for row in range(batch):
        for column in range(width, ids.shape[1]):
            if ids[row, column - 1] in eos and column > width and mask[row, column - 1]:
                mask[row, column:] = 0
    message = prompt(batch, 6, seed)
    return {
        "input_ids": torch.cat((ids, message), dim=1),
        "attention_mask": torch.cat((mask, torch.ones_like(message)), dim=1),
    }


@pytest.mark.parametrize("agreement", ["always", "sometimes", "never"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2"])
def test_three_turns_with_the_returned_cache(strategy: str, family: str, batch: int, agreement: str) -> None:
    model, inputs = target(family, seed=3), padded_prompt(batch, 9, seed=1)
    head = shared_assistant(strategy, model, agreement)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=12)[:, 9:].tolist()
    eos = [row[3 + 3 * i] for i, row in enumerate(text)] if batch > 1 else [VOCAB - 1]
    settings = {"eos_token_id": eos, "return_dict_in_generate": True, "max_new_tokens": 11}
    with caught() as warned:
        outcome = compare(model, lambda: {**inputs, **settings}, strategy, head=head)
        for turn in (1, 2):
            inputs = second_turn(outcome.plain, inputs, eos, seed=turn)
            # both routes get the cache of their own earlier turn; generate() changes it in place
            caches = iter([outcome.plain[CACHE_KEY], outcome.speculative[CACHE_KEY]])
            outcome = compare(
                model, lambda i=inputs, c=caches: {**i, **settings, CACHE_KEY: next(c)}, strategy, head=head
            )
            if agreement == "always" and batch == 1:  # the text may end inside the last block
                assert all(accepted == 4 for accepted in outcome.stats.accepted_draft_tokens[0][:-1])
                assert outcome.stats.accepted > 0
    assert warned == []


@pytest.mark.parametrize("batch", [1, 3])
def test_a_turn_drafts_what_it_would_without_the_cache(
    strategy: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's own context must come along: with a part of it missing, other tokens would be drafted."""
    model, inputs = target("qwen3", seed=4), padded_prompt(batch, 9, seed=1)
    head = untaught(strategy, model)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=12)[:, 9:].tolist()
    eos = [row[3 + 3 * i] for i, row in enumerate(text)] if batch > 1 else [VOCAB - 1]
    settings = {"eos_token_id": eos, "max_new_tokens": 11, "do_sample": False, "assistant_model": head}
    first = model.generate(**inputs, **settings, return_dict_in_generate=True)
    following = second_turn(first, inputs, eos)
    with recorded_drafts(strategy, monkeypatch) as anew:
        expected = model.generate(**following, **settings)
    with recorded_drafts(strategy, monkeypatch) as continued, caught() as warned:
        result = model.generate(**following, **settings, **{CACHE_KEY: first[CACHE_KEY]})
    assert result.tolist() == expected.tolist()
    assert continued == anew
    assert len(continued) > 3
    assert warned == []


def test_a_turn_feeds_only_what_is_new(strategy: str) -> None:
    model, inputs, fed = target("llama", seed=6), padded_prompt(1), []
    head = shared_assistant(strategy, model, "never")
    settings = {"max_new_tokens": 6, "do_sample": False, "assistant_model": head, "return_dict_in_generate": True}
    first = model.generate(**inputs, **settings)
    following = second_turn(first, inputs, [])
    handle = model.get_decoder().layers[0].register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    try:
        model.generate(**following, **settings, **{CACHE_KEY: first[CACHE_KEY]})
    finally:
        handle.remove()
    assert fed[0] == 1 + 6  # the last token of the turn before was never fed, and the new message


@pytest.mark.parametrize("batch", [1, 3])
def test_a_foreign_cache_gives_right_text_and_one_warning(strategy: str, batch: int) -> None:
    model, inputs = target("llama", seed=5), padded_prompt(batch)
    head = shared_assistant(strategy, model, "always")
    kwargs = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(**inputs, **kwargs)
    following = second_turn(first, inputs, [])
    caches = [copy.deepcopy(first[CACHE_KEY]), copy.deepcopy(first[CACHE_KEY])]
    expected = model.generate(**following, **kwargs, **{CACHE_KEY: caches[0]})
    with caught() as warned:
        result = model.generate(**following, **kwargs, **{CACHE_KEY: caches[1]}, assistant_model=head)
    assert result.sequences.tolist() == expected.sequences.tolist()
    assert last_speculation(model).rounds > 0
    kind = drafters.drafter_class(strategy)
    if getattr(kind, "target_layer_ids", None) == [] or kind.state is Drafter.state:  # needs no states of theirs
        assert warned == []
    else:
        assert len(warned) == 1
        assert "cache" in warned[0]


def test_a_cropped_cache(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user takes back the end of an answer and goes on from there with other words."""
    model, ids = target("llama", seed=7), prompt()
    head = untaught(strategy, model)
    settings = {"max_new_tokens": 10, "do_sample": False}
    first = model.generate(ids, **settings, assistant_model=head, return_dict_in_generate=True)
    cache = first[CACHE_KEY]
    cache.crop(-5)
    kept = cache.get_seq_length()
    following = torch.cat((first.sequences[:, :kept], prompt(1, 4, 99)), dim=1)
    with recorded_drafts(strategy, monkeypatch) as anew:
        expected = model.generate(following, **settings, assistant_model=head)
    with recorded_drafts(strategy, monkeypatch) as continued, caught() as warned:
        result = model.generate(following, **settings, assistant_model=head, **{CACHE_KEY: cache})
    assert result.tolist() == expected.tolist() == model.generate(following, **settings).tolist()
    assert continued == anew
    assert warned == []


def test_a_copied_cache_is_a_branch_of_its_own(strategy: str) -> None:
    model, ids = target("mistral", seed=8), prompt()
    head = shared_assistant(strategy, model, "always")
    settings = {"max_new_tokens": 8, "do_sample": False}
    first = model.generate(ids, **settings, assistant_model=head, return_dict_in_generate=True)
    trunk = first[CACHE_KEY]
    for seed in (1, 2, 3):
        following = torch.cat((first.sequences, prompt(1, 5, seed)), dim=1)
        with caught() as warned:
            result = model.generate(following, **settings, assistant_model=head, **{CACHE_KEY: copy.deepcopy(trunk)})
        assert warned == []
        assert result.tolist() == model.generate(following, **settings).tolist()
    assert trunk.get_seq_length() == first.sequences.shape[1] - 1


def test_our_cache_goes_on_in_plain_generate(strategy: str) -> None:
    model, inputs = target("gemma3_text", seed=3), padded_prompt(3)
    head = shared_assistant(strategy, model, "sometimes")
    text = model.generate(**inputs, do_sample=False, max_new_tokens=12)[:, 9:].tolist()
    eos = [row[3 + 3 * i] for i, row in enumerate(text)]
    kwargs = {"max_new_tokens": 11, "eos_token_id": eos, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(**inputs, **kwargs, assistant_model=head)
    following = second_turn(first, inputs, eos)
    result = model.generate(**following, **kwargs, **{CACHE_KEY: first[CACHE_KEY]})
    assert result.sequences.tolist() == model.generate(**following, **kwargs).sequences.tolist()


# -- what cannot take back tokens --------------------------------------------------------------------------------------


class PackedLayer(DynamicLayer):
    """Stands for a layer that stores its states in another form (quantised, offloaded): the loop does not know it."""


class PackedCache(DynamicCache):
    """A cache of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = PackedLayer


def test_an_unknown_layer_means_plain_decoding_and_one_warning(strategy: str) -> None:
    with caught() as warned:
        outcome = compare(
            target(),
            lambda: {"input_ids": prompt(), "max_new_tokens": 8, CACHE_KEY: PackedCache()},
            strategy,
            expect_rounds=False,
        )
    assert len(warned) == 1
    assert "PackedLayer" in warned[0]
    assert outcome.stats.fallback is not None
    assert outcome.stats.rounds == 0


def test_no_cache_means_plain_decoding_and_one_warning(strategy: str) -> None:
    kwargs = {"use_cache": False, "return_dict_in_generate": True}
    with caught() as warned:
        outcome = compare(
            target(), lambda: {"input_ids": prompt(), "max_new_tokens": 8, **kwargs}, strategy, expect_rounds=False
        )
    assert len(warned) == 1
    assert "use_cache" in warned[0]
    assert "use_cache" in outcome.speculative.speculation.fallback


def test_fallback_streams_and_stops_as_well(strategy: str, byte_tokenizer: Any) -> None:
    model = fresh_target("llama", vocab_size=260)
    model.generation_config.suppress_tokens = [i for i in range(260) if not ord("!") + 3 <= i <= ord("~") + 3]
    text = model.generate(prompt(), do_sample=False, max_new_tokens=8)[0, 9:].tolist()
    stop = "".join(chr(token - 3) for token in text[3:5])
    kwargs = {"max_new_tokens": 12, "use_cache": False, "stop_strings": stop, "tokenizer": byte_tokenizer}
    with caught():
        outcome = compare(model, lambda: {"input_ids": prompt(), **kwargs}, strategy, expect_rounds=False)
    assert outcome.speculative.shape[1] == 9 + 5


# -- masks of two dimensions -------------------------------------------------------------------------------------------


def _masked_2d(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention from what flash attention gets: queries at the end of the keys, padding [B, S] or None, a window."""
    k, v = (states.repeat_interleave(q.shape[1] // states.shape[1], dim=1) for states in (k, v))
    places = torch.arange(k.shape[2])
    queries = places[-q.shape[2] :, None]
    mask = places <= queries
    if (window := kwargs.get("sliding_window")) is not None:
        mask &= places > queries - window
    mask = mask[None, None]
    if attention_mask is not None:
        assert attention_mask.dim() == 2
        mask = mask & attention_mask[:, None, None, -k.shape[2] :].bool()
    mask = mask | ~mask.any(-1, keepdim=True)
    states = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scaling"))
    return states.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", WINDOWED)
def test_attention_with_the_masks_of_flash_attention(strategy: str, family: str, batch: int) -> None:
    ALL_ATTENTION_FUNCTIONS.register("masked_2d", _masked_2d)
    ALL_MASK_ATTENTION_FUNCTIONS.register("masked_2d", flash_attention_mask)
    model, inputs = target(family, "masked_2d", seed=1), padded_prompt(batch, 12, seed=3)
    outcome = compare(model, lambda: {**inputs, "max_new_tokens": 18}, strategy, "sometimes")
    gained = [lengths[: min(map(len, outcome.stats.accepted_lengths))] for lengths in outcome.stats.accepted_lengths]
    assert all(row == gained[0] for row in gained)  # level
