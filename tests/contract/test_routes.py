"""The four routes into the loop, the models they must take as they are, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
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
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationMixin, pipeline

from specdec_hf import (
    SpeculativeConfig,
    SpeculativeGenerationMixin,
    SpeculativeModelForCausalLM,
    disable_speculation,
    drafters,
    enable_speculation,
    install,
    last_speculation,
    speculative_decoding,
    uninstall,
)

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [5, 6]}


def untouched(**overrides: Any) -> Any:
    """A target as transformers made it."""
    return disable_speculation(fresh_target(**overrides))


def taught(strategy: str, model: Any, expected: torch.Tensor, width: int = 9) -> Any:
    head = assistant(strategy, model)
    head.teach(expected, torch.arange(expected.shape[1]).expand_as(expected))
    return head


# -- one loop behind four routes ---------------------------------------------------------------------------------------


def test_every_route_ends_in_the_same_loop(strategy: str) -> None:
    model, ids = untouched(), prompt()
    expected = model.generate(ids, **SETTINGS)
    head, figures = taught(strategy, model, expected), []

    def check(result: torch.Tensor) -> None:
        assert result.tolist() == expected.tolist()
        stats = last_speculation(model)
        figures.append((stats.strategy, stats.accepted_lengths, stats.proposal_lengths))

    check(model.generate(ids, **SETTINGS, custom_generate=speculative_decoding(head)))
    check(model.generate(ids, **SETTINGS, custom_generate=speculative_decoding(head, strategy)))
    with install():
        check(model.generate(ids, **SETTINGS, assistant_model=head))
    enable_speculation(model)
    check(model.generate(ids, **SETTINGS, assistant_model=head))  # the head names its strategy
    check(model.generate(ids, **SETTINGS, assistant_model=head, speculative=strategy))
    check(model.generate(ids, **SETTINGS, assistant_model=head, speculative=True))
    check(model.generate(ids, **SETTINGS, assistant_model=head, assistant_strategy=strategy))
    check(model.generate(ids, **SETTINGS, assistant_model=head, speculative=SpeculativeConfig(strategy=strategy)))
    check(model.generate(inputs=ids, **SETTINGS, assistant_model=head))
    check(model.generate(input_ids=ids, **SETTINGS, assistant_model=head, tokenizer=None, synced_gpus=False))
    assert all(entry == figures[0] for entry in figures)
    assert figures[0][0] == strategy
    assert last_speculation(model).accepted > 0


def test_speculative_false_is_plain(strategy: str) -> None:
    model = fresh_target()
    head = assistant(strategy, model)
    result = model.generate(prompt(), **SETTINGS, assistant_model=head, speculative=False)
    assert result.tolist() == model.generate(prompt(), **SETTINGS).tolist()
    assert last_speculation(model) is None


def test_knobs_in_any_of_their_places(strategy: str) -> None:
    model, ids = fresh_target(), prompt()
    head = assistant(strategy, model)
    calls: list[dict[str, Any]] = [
        {"num_assistant_tokens": 2, "assistant_model": head},
        {"speculative": SpeculativeConfig(num_assistant_tokens=2), "assistant_model": head},
        {"custom_generate": speculative_decoding(head), "num_assistant_tokens": 2},
        {"custom_generate": speculative_decoding(head, SpeculativeConfig(num_assistant_tokens=2))},
    ]
    for call in calls:
        model.generate(ids, **SETTINGS, **call)
        assert max(last_speculation(model).proposal_lengths[0]) == 2
    model.generation_config.num_assistant_tokens = 3
    model.generate(ids, **SETTINGS, assistant_model=head)
    assert max(last_speculation(model).proposal_lengths[0]) == 3


# -- taking and giving back the mixin ----------------------------------------------------------------------------------


def test_enable_and_disable(strategy: str, tmp_path: Path) -> None:
    model = untouched()
    original = type(model)
    assert not isinstance(model, SpeculativeGenerationMixin)
    assert enable_speculation(model) is model
    enable_speculation(model)
    assert isinstance(model, SpeculativeGenerationMixin)
    assert isinstance(model, original)
    assert type(model).__name__ == original.__name__
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [original.__name__]
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is original
    assert disable_speculation(model) is model
    assert type(model) is original
    disable_speculation(model)
    assert type(model) is original
    with pytest.raises((ValueError, TypeError)):
        model.generate(prompt(), **SETTINGS, assistant_model=assistant(strategy, model), speculative=strategy)


def test_loading_with_speculation(strategy: str, tmp_path: Path) -> None:
    fresh_target("qwen3", seed=1).save_pretrained(tmp_path)
    model = SpeculativeModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    outcome = compare(model, lambda: {"input_ids": prompt(), **SETTINGS}, strategy)
    assert outcome.stats.drafted > 0
    assert isinstance(SpeculativeModelForCausalLM.from_config(model.config), SpeculativeGenerationMixin)
    with pytest.raises(TypeError, match="from_pretrained"):
        SpeculativeModelForCausalLM()


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_an_enabled_model(strategy: str, way: str) -> None:
    model = fresh_target("llama", seed=2)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert type(other) is type(model)
    assert other is not model
    outcome = compare(other, lambda: {"input_ids": prompt(), **SETTINGS}, strategy)
    assert outcome.plain.tolist() == model.generate(prompt(), **SETTINGS).tolist()
    assert outcome.stats.drafted > 0


def test_a_call_may_follow_one_that_failed(strategy: str) -> None:
    model, head = fresh_target(), None

    def fails(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        raise RuntimeError("stop here")

    head = assistant(strategy, model)
    with pytest.raises(RuntimeError, match="stop here"):
        model.generate(prompt(), **SETTINGS, assistant_model=head, stopping_criteria=[fails])
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    compare(model, lambda: {"input_ids": prompt(), **SETTINGS}, strategy)


# -- install -----------------------------------------------------------------------------------------------------------


def test_install_nests_and_leaves_nothing_behind(strategy: str) -> None:
    original, model = GenerationMixin.generate, untouched()
    head, expected = assistant(strategy, model), model.generate(prompt(), **SETTINGS).tolist()
    install()
    with install():
        assert model.generate(prompt(), **SETTINGS, assistant_model=head).tolist() == expected
        assert last_speculation(model).drafted > 0
    assert GenerationMixin.generate is not original
    assert model.generate(prompt(), **SETTINGS, assistant_model=head).tolist() == expected
    assert model.generate(prompt(), **SETTINGS).tolist() == expected
    uninstall()
    assert GenerationMixin.generate is original
    uninstall()
    assert GenerationMixin.generate is original
    with pytest.raises(ZeroDivisionError), install():
        raise ZeroDivisionError
    assert GenerationMixin.generate is original


def test_install_and_enable_together(strategy: str) -> None:
    with install():
        outcome = compare(fresh_target(), lambda: {"input_ids": prompt(), **SETTINGS}, strategy)
    assert outcome.stats.drafted > 0


# -- pipelines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", ["Hello there", ["Hello there", "Yes"]])
def test_the_text_generation_pipeline_unchanged(strategy: str, texts: Any, byte_tokenizer: Any) -> None:
    model = fresh_target("llama", vocab_size=260)
    settings = {"max_new_tokens": 10, "do_sample": False, "batch_size": 2}
    plain = pipeline("text-generation", model=model, tokenizer=byte_tokenizer)
    expected = plain(texts, **settings)
    head = assistant(strategy, model)
    if not isinstance(head, nn.Module):
        pytest.skip("a pipeline takes models only")
    quick = pipeline("text-generation", model=model, tokenizer=byte_tokenizer, assistant_model=head)
    assert quick(texts, **settings) == expected
    assert last_speculation(model).drafted > 0
    chat = [{"role": "user", "content": "Hi"}]
    assert quick(chat, max_new_tokens=8, do_sample=False) == plain(chat, max_new_tokens=8, do_sample=False)


# -- targets as users have them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_a_target_under_an_adapter(strategy: str, batch: int) -> None:
    peft = pytest.importorskip("peft")
    base, inputs = fresh_target("qwen3"), padded_prompt(batch)
    without = base.generate(**inputs, **SETTINGS)
    names = ["q_proj", "v_proj", "lm_head"]
    model = peft.get_peft_model(disable_speculation(base), peft.LoraConfig(r=2, target_modules=names, lora_alpha=16))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)
    expected = model.generate(**inputs, **SETTINGS)
    assert expected.tolist() != without.tolist()  # the adapter matters
    enable_speculation(model)
    head = assistant(strategy, model)
    assert compare(model, lambda: {**inputs, **SETTINGS}, strategy, head=head).stats.drafted > 0
    with model.disable_adapter():
        assert compare(model, lambda: {**inputs, **SETTINGS}, strategy, head=head).stats.drafted > 0
    loop = speculative_decoding(head)
    assert model.generate(**inputs, **SETTINGS, custom_generate=loop).tolist() == expected.tolist()
    disable_speculation(model)
    assert not isinstance(model.get_base_model(), SpeculativeGenerationMixin)


@pytest.mark.parametrize("way", ["model.compile", "model.forward"])
def test_a_compiled_target(strategy: str, way: str) -> None:
    torch._dynamo.reset()
    model, settings = fresh_target("llama"), {"max_new_tokens": 7, "do_sample": False}
    expected = model.generate(prompt(), **settings)
    head = taught(strategy, model, expected)
    if way == "model.compile":
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):  # each length of the cache compiles anew: seconds a time
        result = model.generate(prompt(), **settings, assistant_model=head)
    assert result.tolist() == expected.tolist()
    assert last_speculation(model).accepted > 0
    torch._dynamo.reset()


class Int8Linear(nn.Module):
    """Weight-only int8, as quantisation libraries put it in the place of a linear layer: no float ``weight``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(states, self.weight.to(states.dtype) * self.scale.to(states.dtype), self.bias)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_quantised_target(strategy: str, batch: int) -> None:
    model = fresh_target("qwen3", seed=3)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
    inputs = padded_prompt(batch)
    outcome = compare(model, lambda: {**inputs, **SETTINGS}, strategy, head=assistant(strategy, model))
    assert outcome.stats.accepted > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_head_in_another_dtype(strategy: str, dtype: torch.dtype) -> None:
    model = target("llama", seed=4)
    head = assistant(strategy, model)
    if not isinstance(head, nn.Module):
        pytest.skip("an assistant without weights")
    outcome = compare(model, lambda: {"input_ids": prompt(), **SETTINGS}, strategy, head=head.to(dtype))
    assert outcome.stats.accepted > 0


def test_a_target_in_bfloat16_runs(strategy: str) -> None:
    model = fresh_target("llama").to(torch.bfloat16)
    head = assistant(strategy, model)
    for inputs in (padded_prompt(1), padded_prompt(3)):
        result = model.generate(**inputs, **SETTINGS, assistant_model=head)
        assert result.shape[0] == inputs["input_ids"].shape[0]
    assert last_speculation(model).rounds > 0


def test_a_target_in_training_mode_is_put_back(strategy: str) -> None:
    model = fresh_target()
    head = assistant(strategy, model)
    model.generate(prompt(), **SETTINGS, assistant_model=head)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup"),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_other_ways_of_decoding_are_refused(strategy: str, arguments: dict[str, Any], word: str, batch: int) -> None:
    model = target()
    head = shared_assistant(strategy, model, "always")
    with caught() as warned, pytest.raises(ValueError, match=word) as refusal:
        model.generate(prompt(batch), max_new_tokens=5, assistant_model=head, **arguments)
    assert "eave out" in str(refusal.value)  # says what to do instead
    assert warned == []


def test_encoder_decoder_models_are_refused(strategy: str) -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 96}
    t5 = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0))
    head = shared_assistant(strategy, target(), "always")
    with pytest.raises(ValueError, match="encoder-decoder"):
        t5.generate(prompt(), max_new_tokens=5, custom_generate=speculative_decoding(head))
    with pytest.raises(ValueError, match="encoder-decoder"):
        enable_speculation(t5).generate(prompt(), max_new_tokens=5, assistant_model=head)


def test_the_strategy_of_a_head_is_one_that_exists(strategy: str) -> None:
    assert drafters.drafter_class(strategy).name == strategy
    with pytest.raises(ValueError, match="There are: "):
        target().generate(
            prompt(), assistant_model=shared_assistant(strategy, target(), "always"), speculative="dsprak"
        )


def test_a_plain_assistant_model_is_still_transformers_own(strategy: str) -> None:
    """On an enabled model, assisted generation with an ordinary model works as before."""
    model, small = fresh_target(seed=1), make_target("llama", seed=2, num_hidden_layers=1)
    result = model.generate(prompt(), **SETTINGS, assistant_model=small)
    assert result.tolist() == model.generate(prompt(), **SETTINGS).tolist()
    assert last_speculation(model) is None
