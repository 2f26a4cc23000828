"""Hostile and mistaken inputs: each is refused with a message that names the value, the rule and what to do instead.

Where the text can still be right (a draft head that is broken), it is, and one warning says why it comes no faster.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from transformers import LogitsProcessor

from specdec_hf import DSparkConfig, DSparkDraftModel, SpeculativeConfig, enable_speculation, speculative_decoding
from specdec_hf.generation import last_speculation

PROMPT = torch.tensor([[5, 9, 4, 7]])
SIZES: dict[str, Any] = {"vocab_size": 32, "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 16}


def small_target(seed: int = 0, **overrides: Any) -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": None}
    return enable_speculation(make_target(seed=seed, **{**SIZES, **heads, **overrides}))


def small_head(target: Any, **overrides: Any) -> DSparkDraftModel:
    fields = {"block_size": 4, "markov_rank": 4, "target_layer_ids": [0, 1], **overrides}
    return DSparkDraftModel(DSparkConfig.for_target(target.config, **fields)).eval()


def generate(target: Any, head: Any, ids: torch.Tensor = PROMPT, **kwargs: Any) -> torch.Tensor:
    options = {"max_new_tokens": 8, "do_sample": False, "assistant_model": head, **kwargs}
    return target.generate(ids, **options)


def plain(target: Any, ids: torch.Tensor = PROMPT, **kwargs: Any) -> torch.Tensor:
    return target.generate(ids, **{"max_new_tokens": 8, "do_sample": False, **kwargs})


def message_of(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# -- heads of another target ------------------------------------------------------------------------------------------

MISFITS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "smaller vocabulary": ({"vocab_size": 24}, ("vocab_size=32", "24", "must be equal", "Use the target")),
    "larger vocabulary": ({"vocab_size": 320}, ("vocab_size=32", "320", "padding", "Use the target")),
    "hidden size": ({"hidden_size": 32}, ("target_hidden_size=16", "32", "must agree", "for_target")),
    "depth": ({"num_hidden_layers": 5}, ("num_target_layers=3", "5", "must agree", "for_target")),
}


@pytest.mark.parametrize("case", MISFITS)
def test_head_of_another_target(case):
    overrides, words = MISFITS[case]
    head = small_head(small_target())
    message = message_of(ValueError, lambda: generate(small_target(**overrides), head))
    assert all(word in message for word in words), message


@pytest.mark.parametrize("taps", [[0, 2], [7]])
def test_tap_on_the_last_layer_or_beyond(taps):
    target = small_target()
    message = message_of(ValueError, lambda: small_head(target, target_layer_ids=taps))
    assert f"target_layer_ids={taps}" in message and ("last layer" in message or "to 1" in message or "0" in message)
    head = small_head(target, target_layer_ids=taps, num_target_layers=None)  # a head that does not say how deep
    message = message_of(ValueError, lambda: generate(target, head))
    assert f"target_layer_ids={taps}" in message and "up to 1" in message and "own target" in message


def test_head_moves_to_another_target_of_the_same_shape():
    first, second = small_target(seed=1), small_target(seed=2)
    head = small_head(first)
    for target in (first, second, first):
        assert torch.equal(generate(target, head), plain(target))
    message = message_of(ValueError, lambda: generate(small_target(hidden_size=32), head))
    assert "target_hidden_size=16" in message
    assert torch.equal(generate(first, head), plain(first)), "a refused target leaves the head usable"


# -- NaN --------------------------------------------------------------------------------------------------------------


class Inert(LogitsProcessor):
    """Unknown to the package: positions are then judged one at a time."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_target_returns_nan(do_sample, in_order, rows):
    target = small_target()
    head = small_head(target, has_lm_head=True)
    with torch.no_grad():
        target.lm_head.weight[3, 0] = float("nan")
    extra = {"logits_processor": [Inert()]} if in_order else {}
    ids = PROMPT.expand(rows, -1)
    message = message_of(ValueError, lambda: generate(target, head, ids, do_sample=do_sample, **extra))
    assert all(word in message for word in ("LlamaForCausalLM", "after 4 tokens", "NaN", "remove_invalid_values"))
    if not in_order:
        assert generate(target, head, ids, do_sample=do_sample, remove_invalid_values=True).shape == (rows, 12)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": True},
        {"do_sample": True, "eta_cutoff": 0.1, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=["greedy", "greedy processors", "sampling", "warpers"],
)
def test_draft_head_returns_nan(options, rows):
    target = small_target()
    head = small_head(target)
    with torch.no_grad():
        head.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    ids = PROMPT.expand(rows, -1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens = generate(target, head, ids, **options)
    ours = [str(w.message) for w in caught if "NaN" in str(w.message)]
    assert len(ours) == 1, ours
    assert all(word in ours[0] for word in ("DSparkDraftModel", "torch.float32", "text stays right", "weights"))
    assert tokens.shape == (rows, 12) and int(tokens.max()) < 32
    if "do_sample" not in options:
        assert torch.equal(tokens, plain(target, ids, **options))
    assert last_speculation(target).drafted > 0


def test_nan_head_with_a_threshold_still_says_so():
    target = small_target()
    head = small_head(target)
    with torch.no_grad():
        head.confidence_head.proj.weight.fill_(float("nan"))
        head.norm.weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match="returns NaN"):
        tokens = generate(target, head, assistant_confidence_threshold=0.3)
    assert torch.equal(tokens, plain(target)) and last_speculation(target).drafted == 0


def test_healthy_head_says_nothing():
    target = small_target()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(target, small_head(target), do_sample=True)


# -- files ------------------------------------------------------------------------------------------------------------


def test_dead_head_is_named_when_loaded(tmp_path, caplog):
    target = small_target()
    head = small_head(target, has_lm_head=True, has_embed_tokens=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    head.save_pretrained(tmp_path)
    with caplog.at_level("WARNING"):
        dead = DSparkDraftModel.from_pretrained(tmp_path)
    assert "are the same" in caplog.text and "untrained" in caplog.text and "Compare" in caplog.text
    assert torch.equal(generate(target, dead), plain(target))


def test_nan_in_the_file(tmp_path):
    head = small_head(small_target())
    with torch.no_grad():
        head.fc.weight[0, 0] = float("nan")
    head.save_pretrained(tmp_path)
    message = message_of(ValueError, lambda: DSparkDraftModel.from_pretrained(tmp_path))
    assert "fc.weight" in message and "NaN" in message and "again" in message


@pytest.mark.parametrize("damage", ["truncated", "pickle only", "nothing"])
def test_unreadable_weights(damage, tmp_path):
    head = small_head(small_target())
    head.save_pretrained(tmp_path)
    weights: Path = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    if damage == "truncated":
        weights.write_bytes(whole[: len(whole) // 2])
        words: tuple[str, ...] = ("model.safetensors", "truncated", "download it again")
    elif damage == "pickle only":
        torch.save(head.state_dict(), tmp_path / "pytorch_model.bin")
        words = ("pytorch_model.bin", "pickle", "convert it to safetensors")
    else:
        words = ("model.safetensors", "only safetensors")
    message = message_of((ValueError, OSError), lambda: DSparkDraftModel.from_pretrained(tmp_path))
    assert all(word in message for word in words), message


# -- prompts and budgets ----------------------------------------------------------------------------------------------


def test_empty_batch():
    target = small_target()
    message = message_of(ValueError, lambda: generate(target, small_head(target), PROMPT[:0]))
    assert "[0, 4]" in message and "empty batch" in message and "at least one prompt" in message


@pytest.mark.parametrize("budget", [{"max_new_tokens": 0}, {"max_new_tokens": None, "max_length": 4}])
def test_no_budget_is_answered_as_by_plain_generate(budget):
    target = small_target()
    expected = message_of(ValueError, lambda: plain(target, **budget))
    assert message_of(ValueError, lambda: generate(target, small_head(target), **budget)) == expected


@pytest.mark.parametrize("budget", [1, 2])
def test_smallest_budgets(budget):
    target = small_target()
    assert torch.equal(
        generate(target, small_head(target), max_new_tokens=budget), plain(target, max_new_tokens=budget)
    )


# -- arguments --------------------------------------------------------------------------------------------------------

ARGUMENTS: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"speculative": 3}, TypeError, ("speculative=3", "strategy's name", "SpeculativeConfig")),
    ({"speculative": ["dspark"]}, TypeError, ("list", "strategy's name")),
    ({"speculative": "dpsark"}, ValueError, ("'dpsark'", "did you mean 'dspark'", "There are")),
    ({"assistant_strategy": "dpsark"}, ValueError, ("'dpsark'", "did you mean 'dspark'")),
    (
        {"speculative": "dspark", "assistant_strategy": "medusa"},
        ValueError,
        ("'dspark'", "'medusa'", "differ", "pass one"),
    ),
    ({"num_assistant_tokens": 0}, ValueError, ("num_assistant_tokens=0", "at least 1", "Leave it out")),
    ({"num_assistant_tokens": -1}, ValueError, ("num_assistant_tokens=-1", "at least 1")),
    ({"num_assistant_tokens": True}, ValueError, ("num_assistant_tokens=True", "integer")),
    ({"num_assistant_tokens": 2.5}, ValueError, ("num_assistant_tokens=2.5", "integer")),
    ({"num_assistant_tokens": 5}, ValueError, ("num_assistant_tokens=5", "at most 4", "leave it out")),
    ({"num_assistant_tokens_schedule": "constnat"}, ValueError, ("'constnat'", "did you mean 'constant'", "There are")),
    ({"assistant_confidence_threshold": 1.5}, ValueError, ("threshold=1.5", "[0, 1]", "0 verifies every")),
    ({"assistant_confidence_threshold": -0.1}, ValueError, ("threshold=-0.1", "[0, 1]")),
    ({"assistant_confidence_threshold": float("nan")}, ValueError, ("threshold=nan", "[0, 1]")),
    ({"assistant_confidence_threshold": "high"}, ValueError, ("threshold='high'", "[0, 1]")),
    ({"generator": 7}, TypeError, ("generator=7", "torch.Generator", "manual_seed")),
    ({"generator": [torch.Generator()] * 2, "do_sample": True}, ValueError, ("2 entries for 1 rows", "one per row")),
    ({"num_beams": 2}, ValueError, ("num_beams=2", "beam search", "Leave out num_beams")),
    ({"synced_gpus": True}, ValueError, ("synced_gpus=True", "Leave out synced_gpus")),
    ({"stop_strings": ["x"]}, ValueError, ("stop_strings=['x']", "tokenizer")),
]


def name_of(arguments):
    """A test's name must not hold an address, or two workers would collect different tests."""
    return re.sub(r" at 0x\w+", "", str(arguments))[:60]


@pytest.mark.parametrize(("arguments", "kind", "words"), ARGUMENTS, ids=[name_of(case[0]) for case in ARGUMENTS])
def test_arguments(arguments, kind, words):
    target = small_target()
    message = message_of(kind, lambda: generate(target, small_head(target), **arguments))
    assert all(word in message for word in words), message


def test_threshold_without_a_confidence_head():
    target = small_target()
    head = small_head(target, enable_confidence_head=False)
    message = message_of(ValueError, lambda: generate(target, head, assistant_confidence_threshold=0.4))
    assert all(word in message for word in ("threshold=0.4", "enable_confidence_head=False", "leave"))


@pytest.mark.parametrize("name", ["speculative", "assistant_strategy"])
@pytest.mark.parametrize("assistant", [None, "a path", torch.nn.Linear(2, 2)])
def test_assistant_of_another_kind(name, assistant):
    message = message_of(TypeError, lambda: generate(small_target(), assistant, **{name: "dspark"}))
    kind = type(assistant).__name__
    assert all(word in message for word in ("'dspark'", "DSparkDraftModel", kind, "from_pretrained")), message


def test_causal_lm_as_dspark_assistant():
    target = small_target()
    message = message_of(TypeError, lambda: generate(target, small_target(seed=4), speculative="dspark"))
    assert "LlamaForCausalLM" in message and "DSparkDraftModel" in message
    message = message_of(ValueError, lambda: generate(target, None, speculative=True))
    assert "assistant_model" in message and "NoneType" in message and "speculative='dspark'" in message


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"draft_top_k": 0}, ValueError, ("draft_top_k=0", "at least 1")),
        ({"strategy": 3}, TypeError, ("strategy=3", "name")),
        ({"generator": [1]}, TypeError, ("generator=[1]", "one per row")),
        ({"generator": [torch.Generator(), None]}, TypeError, ("one per row",)),
    ],
)
def test_configuration_fields(fields, kind, words):
    message = message_of(kind, lambda: SpeculativeConfig(**fields))
    assert all(word in message for word in words), message


def test_both_names_may_say_the_same():
    target = small_target()
    for wish in ("dspark", SpeculativeConfig(strategy="dspark"), SpeculativeConfig(num_assistant_tokens=2)):
        tokens = generate(target, small_head(target), speculative=wish, assistant_strategy="dspark")
        assert torch.equal(tokens, plain(target))
        assert last_speculation(target).rounds > 0


def test_without_a_strategy_the_hook_refuses_at_once():
    message = message_of(ValueError, lambda: speculative_decoding(None))
    assert "assistant_model" in message and "DSparkDraftModel" in message


def test_enable_speculation_on_something_else():
    message = message_of(TypeError, lambda: enable_speculation(torch.nn.Linear(2, 2)))
    assert "Linear" in message and "generate()" in message and "AutoModelForCausalLM" in message


def test_a_paged_cache_is_refused_before_transformers_takes_the_call_away() -> None:
    target = make_target("llama")
    enable_speculation(target)
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, block_size=3, num_hidden_layers=1)).eval()
    with pytest.raises(ValueError, match=r"cache_implementation='paged'.*Leave it out"):
        target.generate(torch.tensor([[3, 4]]), assistant_model=head, cache_implementation="paged", max_new_tokens=2)
