"""Targets with recurrent layers: linear attention, Mamba, short convolutions, beside or instead of attention."""

from __future__ import annotations

import copy
import threading
from typing import Any

import conftest
import harness
import pytest
import torch
from harness import (
    STRATEGIES,
    assistant,
    caught,
    compare,
    fresh_target,
    padded_prompt,
    prompt,
    shared_assistant,
    target,
)
from test_distribution import exact_joint, fit, random_head, sample, small_target
from transformers import StaticCache

from specdec_hf import SpeculativeConfig, forward, last_speculation
from specdec_hf._hf import CACHE_KEY
from specdec_hf.recurrent import MixerReplay

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": _DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},  # attention and Mamba in the same layer
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
    },
}
PLAIN: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}
"""These read a block as if nothing came before it, so they cannot verify one."""
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2}
harness.FURTHER.update({**FAMILIES, **PLAIN, "mamba2": _MAMBA2})
SETTINGS = {"max_new_tokens": 18}


@pytest.mark.parametrize(("batch", "agreement"), [(1, "always"), (1, "sometimes"), (1, "never"), (3, "sometimes")])
@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_tokens_leave_no_trace(family: str, batch: int, agreement: str) -> None:
    inputs = padded_prompt(batch, 9, seed=1)
    outcome = compare(target(family), lambda: {**inputs, **SETTINGS}, "dspark", agreement)
    assert outcome.stats.drafted > 12
    if batch == 1:
        assert (outcome.stats.accepted > 0) == (agreement != "never")


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "dspark"])
def test_other_strategies(strategy: str) -> None:
    outcome = compare(target("qwen3_next"), lambda: {"input_ids": prompt(), **SETTINGS}, strategy, "sometimes")
    assert outcome.stats.drafted > 0


def test_only_the_mixers_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejection must not cost a second forward of the target."""
    model, replays = target("qwen3_next"), []
    run = MixerReplay.run
    monkeypatch.setattr(MixerReplay, "run", lambda *args: (replays.append(args[2]), run(*args))[1])
    compare(model, lambda: {"input_ids": prompt(), **SETTINGS}, "dspark", "never")
    calls: list[str] = []
    handles = [layer.register_forward_pre_hook(lambda *_: calls.append("layer")) for layer in model.model.layers]
    head = shared_assistant("dspark", model, "never")
    model.generate(prompt(), **SETTINGS, do_sample=False, assistant_model=head)
    for handle in handles:
        handle.remove()
    stats = last_speculation(model)
    assert stats.rounds == 17
    assert len(calls) == 2 * (1 + stats.rounds)
    assert len(replays) == 2 * sum(length > 0 for length in stats.proposal_lengths[0])
    assert set(replays) == {1}


@pytest.mark.parametrize("kind", ["dynamic", "static_object"])
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_caches_and_a_second_turn(family: str, kind: str) -> None:
    model, ids = target(family, seed=2), prompt()
    made = {
        "dynamic": dict,
        "static_object": lambda: {CACHE_KEY: StaticCache(config=model.config, max_cache_len=64)},
    }[kind]
    with caught() as warned:
        first = compare(
            model,
            lambda: {"input_ids": ids, **SETTINGS, **made(), "return_dict_in_generate": True},
            "dspark",
            "sometimes",
        )
        following = torch.cat((first.plain.sequences, prompt(1, 5, 7)), dim=1)
        caches = iter([copy.deepcopy(first.speculative[CACHE_KEY]), first.speculative[CACHE_KEY]])
        settings = {} if kind == "dynamic" else {"max_new_tokens": 9}
        second = compare(
            model,
            lambda: {"input_ids": following, **SETTINGS, **settings, CACHE_KEY: next(caches)},
            "dspark",
            "sometimes",
        )
    assert warned == []
    assert second.stats.accepted > 0
    expected = model.generate(following, do_sample=False, **{**SETTINGS, **settings})
    assert second.plain.tolist() == expected.tolist()  # the handed back state is right, for plain generate() too


def test_outputs_and_several_answers() -> None:
    inputs = padded_prompt(2, 9, seed=3)
    kwargs = {**inputs, "do_sample": True, "top_k": 1, "num_return_sequences": 2, "return_dict_in_generate": True}
    names = ("scores", "logits", "hidden_states")
    outcome = compare(
        target("qwen3_next"), lambda: {**kwargs, **SETTINGS, **{f"output_{n}": True for n in names}}, "dspark"
    )
    for name in names:
        plain, ours = getattr(outcome.plain, name), getattr(outcome.speculative, name)
        assert len(plain) == len(ours)
        if name != "hidden_states":
            torch.testing.assert_close(torch.stack(ours), torch.stack(plain), atol=1e-3, rtol=1e-3)


def test_sampling_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(conftest.FAMILIES, "qwen3_5_text", {})
    model = small_target(family="qwen3_5_text", **_DELTA, vocab_size=4)
    tokens = sample(model, random_head(model), samples=160, rows=2, prompt=[3, 1, 2], max_new_tokens=4, top_k=0)
    assert fit(tokens, exact_joint(model, [3, 1, 2], [], length=3)) > 1e-4
    assert last_speculation(model).rounds > 0


def test_coupled_sampling_does_not_depend_on_what_was_rejected() -> None:
    model = target("falcon_h1")
    for seed in range(2):
        config = SpeculativeConfig(strategy="dspark", coupling="gumbel", seed=seed)
        texts = [
            model.generate(
                prompt(), do_sample=True, **SETTINGS, assistant_model=assistant("dspark", model), speculative=config,
                num_assistant_tokens=width,
            ).tolist()
            for width in (1, 2, 4)
        ]  # fmt: skip
        assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", PLAIN)
def test_families_that_forget_their_state_decode_plainly(family: str, dtype: torch.dtype) -> None:
    model = fresh_target(family).to(dtype)
    with caught() as warned:
        outcome = compare(
            model,
            lambda: {"input_ids": prompt(), **SETTINGS},
            head=shared_assistant("dspark", target(), "always"),
            expect_rounds=False,
        )
    assert len(warned) == 1
    assert "one by one" in outcome.stats.fallback


def test_a_model_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tries = fresh_target("lfm2"), []
    attempt = forward._try_replay
    monkeypatch.setattr(forward, "_try_replay", lambda model: (tries.append(1), attempt(model))[1])
    head = assistant("dspark", model)
    for _ in range(2):
        model.generate(prompt(), **SETTINGS, assistant_model=head)
    assert tries == [1]
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_hidden_mixers_decode_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose mixers' calls cannot be seen, as after compilation."""
    model = fresh_target("lfm2")
    monkeypatch.setattr(MixerReplay, "note_update", lambda self, index: None)
    with caught() as warned:
        compare(
            model, lambda: {"input_ids": prompt(), **SETTINGS}, head=assistant("dspark", model), expect_rounds=False
        )
    assert len(warned) == 1
    assert "compiled" in last_speculation(model).fallback


def test_threads_replay_their_own_inputs() -> None:
    model, results = fresh_target("qwen3_next"), {}
    head = assistant("dspark", model, "never")
    prompts = [prompt(1, 9, seed) for seed in range(2)]
    expected = [model.generate(ids, do_sample=False, max_new_tokens=14).tolist() for ids in prompts]

    def work(i: int) -> None:
        settings = {"do_sample": False, "max_new_tokens": 14, "assistant_model": head}
        results[i] = [model.generate(prompts[i], **settings).tolist() for _ in range(2)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [text] * 2 for i, text in enumerate(expected)}
    assert last_speculation(model).drafted > 0


def test_recurrent_drafts_are_refused() -> None:
    draft = fresh_target("lfm2")
    with pytest.raises(ValueError, match="cannot draft"):
        target().generate(prompt(), assistant_model=draft, speculative="draft_model")


def test_nothing_but_recurrent_layers() -> None:
    model = fresh_target("mamba2", "eager")
    with caught() as warned:
        compare(
            model,
            lambda: {"input_ids": prompt(), **SETTINGS},
            head=shared_assistant("dspark", target(), "always"),
            expect_rounds=False,
        )
    assert len(warned) == 1
    assert last_speculation(model).fallback is not None
