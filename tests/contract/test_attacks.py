"""Faults that a hostile reader suspected: overlooked arguments, defaults that won, positions never reached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_target, make_tokenizer
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, MaxLengthCriteria

from specdec_hf import (
    DSparkConfig,
    DSparkDraftModel,
    SpeculativeConfig,
    enable_speculation,
    last_speculation,
    speculative_decoding,
)

IDS = torch.tensor([[5, 9, 3, 7]])


@pytest.fixture
def pair() -> tuple[Any, Any]:
    target = enable_speculation(make_target("llama"))
    return target, DSparkDraftModel(DSparkConfig.for_target(target.config, block_size=4, num_hidden_layers=1)).eval()


def drafted(target: Any) -> int:
    return max(last_speculation(target).proposal_lengths[0])


def test_the_call_wins_over_the_config_and_the_config_over_stored_defaults(pair: tuple[Any, Any]) -> None:
    target, head = pair
    target.generation_config.num_assistant_tokens = 3
    call: dict[str, Any] = {"assistant_model": head, "max_new_tokens": 12, "do_sample": False}
    target.generate(IDS, **call)
    assert drafted(target) == 3
    target.generate(IDS, **call, speculative=SpeculativeConfig(num_assistant_tokens=2))
    assert drafted(target) == 2
    target.generate(IDS, **call, speculative=SpeculativeConfig(num_assistant_tokens=2), num_assistant_tokens=1)
    assert drafted(target) == 1
    loop = speculative_decoding(head, SpeculativeConfig(num_assistant_tokens=2))
    target.generate(IDS, custom_generate=loop, max_new_tokens=12, do_sample=False)
    assert drafted(target) == 2


def test_a_stored_number_of_tokens_larger_than_the_block_is_no_mistake_of_the_caller(pair: tuple[Any, Any]) -> None:
    target, head = pair
    target.generation_config.num_assistant_tokens = 9
    target.generate(IDS, assistant_model=head, max_new_tokens=12, do_sample=False)
    assert drafted(target) == 4
    with pytest.raises(ValueError, match=r"num_assistant_tokens=9.*at most 4"):
        target.generate(IDS, assistant_model=head, max_new_tokens=12, num_assistant_tokens=9)


class Ban(LogitsProcessor):
    """Forbids the most likely token of the plain text, so that overlooking it shows."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token] = -torch.inf
        return scores


def test_arguments_by_position_count(pair: tuple[Any, Any]) -> None:
    target, head = pair
    first = int(target.generate(IDS, max_new_tokens=1, do_sample=False)[0, -1])
    config = GenerationConfig(max_new_tokens=8, do_sample=False, stop_strings=["never there"], eos_token_id=None)
    processors, criteria = LogitsProcessorList([Ban(first)]), [MaxLengthCriteria(9)]
    plain = target.generate(IDS, config, processors, criteria, tokenizer=make_tokenizer())
    ours = target.generate(IDS, config, processors, criteria, None, None, head, tokenizer=make_tokenizer())
    assert torch.equal(ours, plain) and ours.shape[1] == 9 and first not in ours[0, 4:]
    assert last_speculation(target).rounds > 0


def test_stop_strings_of_the_model_stay_in_force_for_a_call_inside_the_call(pair: tuple[Any, Any]) -> None:
    target, head = pair
    tokenizer = make_tokenizer()
    text = target.generate(IDS, max_new_tokens=10, do_sample=False)[0, 4:]
    target.generation_config.stop_strings = [tokenizer.decode(text[3:5])]
    outer = target.generate(IDS, max_new_tokens=10, do_sample=False, tokenizer=tokenizer)
    assert outer.shape[1] < 14
    inner: list[torch.Tensor] = []

    class Asks(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not inner:
                inner.append(target.generate(IDS, max_new_tokens=10, do_sample=False, tokenizer=tokenizer))
            return scores

    call: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "tokenizer": tokenizer}
    ours = target.generate(IDS, assistant_model=head, logits_processor=LogitsProcessorList([Asks()]), **call)
    assert torch.equal(ours, outer) and torch.equal(inner[0], outer)


class NothingAfter(LogitsProcessor):
    """No token may follow `token`: NaN probabilities, at a position that the text itself never reaches."""

    pure_function_of_prefix = True

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where((input_ids[:, -1] == self.token)[:, None], torch.full_like(scores, -torch.inf), scores)


def test_positions_behind_a_stop_may_be_impossible(pair: tuple[Any, Any]) -> None:
    target, head = pair
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_k": 1, "pad_token_id": 0}
    text = target.generate(IDS, **settings, eos_token_id=None)[0, 4:]
    stop = int(text[2])
    processors = LogitsProcessorList([NothingAfter(stop)])
    call: dict[str, Any] = {**settings, "eos_token_id": stop, "logits_processor": processors}
    plain = target.generate(IDS, **call)
    # prompt lookup on a prompt that holds the text drafts right past the stop
    assert torch.equal(target.generate(IDS, assistant_model=head, **call), plain)
    prompt = torch.cat((IDS, text[None], IDS), dim=1)
    try:
        expected = target.generate(prompt, **call)
    except RuntimeError:
        pytest.skip("this text goes on after the stop")
    assert torch.equal(target.generate(prompt, speculative="prompt_lookup", **call), expected)


def test_two_ways_to_decode_are_refused(pair: tuple[Any, Any]) -> None:
    target, head = pair
    with pytest.raises(ValueError, match="custom_generate are two ways"):
        target.generate(IDS, speculative="dspark", custom_generate=speculative_decoding(head), max_new_tokens=2)


def test_a_call_that_fails_leaves_no_figures_and_no_hooks(pair: tuple[Any, Any]) -> None:
    target, head = pair
    target.generate(IDS, assistant_model=head, max_new_tokens=6, do_sample=False)

    class Fails(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.generate(IDS, assistant_model=head, logits_processor=LogitsProcessorList([Fails()]), max_new_tokens=6)
    assert last_speculation(target) is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())
