"""Prompts in every form that generate() takes: padded batches, positions, embeddings, chunks, several answers."""

from __future__ import annotations

import pytest
import torch
from harness import PAD, STRATEGIES, acceptable, compare, padded_prompt, prompt, shared_assistant, target

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)
AGREEMENTS = ("always", "sometimes")


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "opt", "bloom", "mistral"])
def test_left_padding_and_holes(strategy: str, family: str, attention: str, batch: int, holes: bool) -> None:
    inputs = padded_prompt(batch, 11, seed=batch, holes=holes)
    model = target(family, attention, seed=2)
    compare(model, lambda: {**inputs, "max_new_tokens": 13, "eos_token_id": [5, 6, 7, 8]}, strategy, "sometimes")


def test_padding_without_a_mask_is_seen_by_its_token(strategy: str) -> None:
    inputs = padded_prompt(3)
    compare(
        target(),
        lambda: {"input_ids": inputs["input_ids"], "pad_token_id": PAD, "max_new_tokens": 10},
        strategy,
        "sometimes",
    )


def test_a_mask_with_a_hole_in_one_row(strategy: str) -> None:
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, :2], mask[0, 4:6] = 0, 0
    kwargs = {"input_ids": prompt(1, 12), "attention_mask": mask, "max_new_tokens": 15}
    outcome = compare(target("qwen3"), lambda: dict(kwargs), strategy)
    assert outcome.stats.accepted == acceptable(outcome.stats)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_position_ids(strategy: str, family: str, shift: int, batch: int) -> None:
    inputs = padded_prompt(batch, 10, seed=2)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0) + shift
    taught = torch.cat((positions, positions[:, -1:] + torch.arange(1, 13)), dim=1)
    outcome = compare(
        target(family), lambda: {**inputs, "position_ids": positions, "max_new_tokens": 12}, strategy, positions=taught
    )
    assert outcome.stats.accepted > 0.8 * acceptable(outcome.stats)


@pytest.mark.parametrize("agreement", AGREEMENTS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mistral"])
def test_embedded_prompts(strategy: str, family: str, batch: int, agreement: str) -> None:
    model, inputs = target(family), padded_prompt(batch, 10)
    embeds = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    outcome = compare(
        model,
        lambda: {**inputs, "inputs_embeds": embeds, "max_new_tokens": 12, "eos_token_id": [5, 6, 7]},
        strategy,
        agreement,
        expect_rounds=family != "mistral",
    )
    assert outcome.speculative.shape[1] <= 12


def test_embedded_prompts_with_their_ids(strategy: str) -> None:
    model, ids = target(), prompt()
    embeds = model.get_input_embeddings()(ids).detach() * 1.01
    kwargs = {"input_ids": ids, "inputs_embeds": embeds, "max_new_tokens": 12, "repetition_penalty": 1.3}
    outcome = compare(model, lambda: dict(kwargs), strategy)
    assert outcome.speculative.shape[1] == 9 + 12


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_several_answers_a_prompt(strategy: str, batch: int, count: int) -> None:
    """Greedy decoding has one answer only, so several are drawn; top_k=1 leaves nothing to chance."""
    inputs = padded_prompt(batch, 9, seed=3)
    kwargs = {**inputs, "do_sample": True, "top_k": 1, "num_return_sequences": count, "max_new_tokens": 11}
    outcome = compare(target(), lambda: {**kwargs, "eos_token_id": [5, 6, 7, 8, 9]}, strategy, "sometimes")
    assert outcome.speculative.shape[0] == batch * count


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_prefill_in_chunks(strategy: str, family: str, chunk: int, batch: int) -> None:
    inputs = padded_prompt(batch, 13)
    kwargs = {**inputs, "prefill_chunk_size": chunk, "max_new_tokens": 12}
    compare(target(family), lambda: dict(kwargs), strategy, "sometimes")


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts(strategy: str, length: int) -> None:
    compare(target(), lambda: {"input_ids": prompt(1, length), "max_new_tokens": 12}, strategy)
    compare(target(), lambda: {"input_ids": prompt(3, length), "max_new_tokens": 12}, strategy, "sometimes")


def test_forced_first_and_last_tokens(strategy: str) -> None:
    kwargs = {"input_ids": torch.tensor([[1], [1]]), "forced_bos_token_id": 11, "forced_eos_token_id": 12}
    outcome = compare(target(), lambda: {**kwargs, "max_new_tokens": 12, "eos_token_id": 12}, strategy)
    assert outcome.speculative[:, 1].tolist() == [11, 11]
    assert outcome.speculative[:, -1].tolist() == [12, 12]


@pytest.mark.parametrize("batch", [1, 3])
def test_classifier_free_guidance(strategy: str, batch: int) -> None:
    inputs = padded_prompt(batch)
    inputs["attention_mask"][:] = 1
    kwargs = {**inputs, "guidance_scale": 1.5, "max_new_tokens": 10}
    compare(target("llama", seed=2), lambda: dict(kwargs), strategy, "sometimes")


def test_long_texts_outgrow_the_first_buffers(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import specdec_hf.cache as cache

    monkeypatch.setattr(cache, "_FIRST_RESERVE", 8)
    inputs = padded_prompt(2, 9)
    for family in ("llama", "gemma3_text"):
        compare(target(family), lambda: {**inputs, "max_new_tokens": 60}, strategy, "sometimes")


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_fewer_drafted_tokens_than_the_block(strategy: str, number: int) -> None:
    outcome = compare(
        target(), lambda: {"input_ids": prompt(), "max_new_tokens": 19, "num_assistant_tokens": number}, strategy
    )
    assert max(outcome.stats.proposal_lengths[0]) == number


def test_more_drafted_tokens_than_the_block_are_refused(strategy: str) -> None:
    most = shared_assistant(strategy, target(), "always").max_draft_tokens
    call = {"input_ids": prompt(), "max_new_tokens": 19, "num_assistant_tokens": most + 1}
    with pytest.raises(ValueError, match=rf"num_assistant_tokens={most + 1} .*at most {most}"):
        compare(target(), lambda: dict(call), strategy)
