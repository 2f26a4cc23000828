"""From what users write to one configuration: who wins, what counts as set. What is refused stands in test_hostile."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from specdec_hf import SpeculativeConfig
from specdec_hf.options import KNOBS, did_you_mean, knobs_of_prepared, resolve, strategy_of, user_set

HEAD = SimpleNamespace(config=SimpleNamespace(speculative_strategy="dspark"))


def resolved(head=HEAD, speculative=None, alias=None, generator=None, **knobs):
    return resolve(head, speculative, alias, generator, knobs)


def test_the_heads_strategy_is_the_default():
    assert strategy_of(HEAD) == "dspark" and strategy_of(None) is None and strategy_of(object()) is None
    for wish in (None, True, SpeculativeConfig()):
        assert resolved(speculative=wish).strategy == "dspark"
    assert resolved(speculative="prompt_lookup").strategy == "prompt_lookup"
    assert resolved(alias="prompt_lookup").strategy == "prompt_lookup"


def test_arguments_of_the_call_win():
    config = SpeculativeConfig(num_assistant_tokens=3, assistant_confidence_threshold=0.2, draft_top_k=9)
    own = torch.Generator()
    merged = resolved(speculative=config, generator=own, num_assistant_tokens=5, assistant_confidence_threshold=None)
    assert (merged.num_assistant_tokens, merged.assistant_confidence_threshold, merged.draft_top_k) == (5, 0.2, 9)
    assert merged.generator is own and config.generator is None, "the user's object stays as it is"
    with pytest.raises(FrozenInstanceError):
        config.num_assistant_tokens = 1


def test_merged_values_are_checked_too():
    with pytest.raises(ValueError, match="num_assistant_tokens=0"):
        resolved(num_assistant_tokens=0)


def test_user_set_looks_in_order():
    call, own = GenerationConfig(num_assistant_tokens=4), GenerationConfig(num_assistant_tokens=6)
    assert user_set("num_assistant_tokens", {"num_assistant_tokens": 2}, [call, own]) == 2
    assert user_set("num_assistant_tokens", {}, [call, own]) == 4
    assert user_set("num_assistant_tokens", {}, [None, own]) == 6
    assert user_set("num_assistant_tokens", {}, [None, GenerationConfig()]) is None


def test_transformers_own_defaults_count_as_unset():
    prepared = SimpleNamespace(**dict.fromkeys(KNOBS))
    prepared.num_assistant_tokens, prepared.assistant_confidence_threshold = 20, 0.4
    assert set(knobs_of_prepared(prepared).values()) == {None}
    prepared.num_assistant_tokens = 3
    assert knobs_of_prepared(prepared)["num_assistant_tokens"] == 3


def test_did_you_mean():
    assert did_you_mean("dpsark", ["dspark", "medusa"]) == " (did you mean 'dspark'?)"
    assert did_you_mean("zebra", ["dspark"]) == ""
