"""Speculation where users have it: pipelines, streamers in threads, stored settings, other people's `generate` calls.

Each test fails if speculation silently did not happen: the statistics must show rounds and drafted tokens.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import STRATEGIES, assistant, caught, compare, fresh_target, padded_prompt, prompt
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from specdec_hf import SpeculativeModelForCausalLM, disable_speculation, enable_speculation, install, last_speculation

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)
SETTINGS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
PLACES = ("layers on disk", "hooks on every module", "all on meta")
CHAT = [{"role": "user", "content": "Hi"}]


def speaking_target(**overrides: Any) -> Any:
    """A target of the byte tokenizer that says printable characters only."""
    model = fresh_target("llama", vocab_size=260, **overrides)
    model.generation_config.suppress_tokens = [i for i in range(260) if not ord("!") + 3 <= i <= ord("~") + 3]
    return model


def speculated(model: Any) -> Any:
    stats = last_speculation(model)
    assert stats is not None
    assert stats.fallback is None
    assert stats.rounds > 0
    assert stats.drafted > 0
    return stats


# -- pipelines and streamers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", ["Hello there", ["Hello there", "Yes"], CHAT, [CHAT, [*CHAT, *CHAT]]])
def test_a_pipeline_over_a_model_with_a_default(strategy: str, texts: Any, byte_tokenizer: Any) -> None:
    model = speaking_target()
    pipe = pipeline("text-generation", model=model, tokenizer=byte_tokenizer)
    expected = pipe(texts, **SETTINGS, batch_size=2)
    assert last_speculation(model) is None
    enable_speculation(model, assistant(strategy, model), strategy)
    assert pipe(texts, **SETTINGS, batch_size=2) == expected
    speculated(model)


def test_a_pipeline_streams(strategy: str, byte_tokenizer: Any) -> None:
    model, texts = speaking_target(), []
    enable_speculation(model, assistant(strategy, model), strategy)

    class Listener(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            texts.append(text)

    pipe = pipeline("text-generation", model=model, tokenizer=byte_tokenizer)
    result = pipe("Hello", **SETTINGS, streamer=Listener(byte_tokenizer, skip_prompt=True), return_full_text=False)
    assert "".join(texts) == result[0]["generated_text"]
    speculated(model)


def test_an_iterator_streamer_in_a_thread(strategy: str, byte_tokenizer: Any) -> None:
    model, inputs = speaking_target(), byte_tokenizer("Hello", return_tensors="pt")
    expected = byte_tokenizer.decode(model.generate(**inputs, **SETTINGS)[0, 5:])
    streamer = TextIteratorStreamer(byte_tokenizer, skip_prompt=True, timeout=60)
    arguments = {**inputs, **SETTINGS, "assistant_model": assistant(strategy, model), "speculative": strategy}
    thread = threading.Thread(target=model.generate, kwargs={**arguments, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == expected
    thread.join()
    speculated(model)


# -- stored settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["object", "file", "model"])
def test_a_generation_config(strategy: str, place: str, tmp_path: Path) -> None:
    model, ids = fresh_target(), prompt()
    settings = {"max_new_tokens": 13, "do_sample": False, "repetition_penalty": 1.3, "eos_token_id": [3, 5]}
    config = GenerationConfig(**settings, pad_token_id=0, num_assistant_tokens=2)
    if place == "file":
        config.save_pretrained(tmp_path)
        config = GenerationConfig.from_pretrained(tmp_path)
    if place == "model":
        model.generation_config = config
    arguments = {} if place == "model" else {"generation_config": config}
    compare(
        model, lambda: {"input_ids": ids, **arguments, "do_sample": False}, strategy, head=assistant(strategy, model)
    )
    assert max(speculated(model).proposal_lengths[0]) == 2


# -- a default assistant -----------------------------------------------------------------------------------------------


def test_a_default_assistant(strategy: str) -> None:
    model, other = fresh_target(), fresh_target(seed=1)
    expected = model.generate(prompt(), **SETTINGS).tolist()
    head = assistant(strategy, model)
    assert enable_speculation(model, head, strategy) is model
    enable_speculation(model)  # without arguments it stays
    assert model.generate(prompt(), **SETTINGS).tolist() == expected
    speculated(model)
    assert not any(module is head for module in model.modules())
    assert other.generate(prompt(), **SETTINGS) is not None
    assert last_speculation(other) is None
    model._last_speculation = None
    assert model.generate(prompt(), **SETTINGS, speculative=False).tolist() == expected
    assert last_speculation(model) is None
    for beams in ({"num_beams": 2}, {"generation_config": GenerationConfig(num_beams=2, pad_token_id=0)}):
        with caught() as warned:
            result = model.generate(prompt(), **SETTINGS, **beams)
        assert len(warned) == 1
        assert "num_beams" in warned[0]
        assert result.tolist() == disable_speculation(fresh_target()).generate(prompt(), **SETTINGS, **beams).tolist()
    disable_speculation(model)
    enable_speculation(model)
    model.generate(prompt(), **SETTINGS)
    assert last_speculation(model) is None
    with pytest.raises(ValueError, match="There are: "):
        enable_speculation(model, head, "dsprak")


# -- other people's calls ----------------------------------------------------------------------------------------------


class StopOnStrings(StoppingCriteria):
    """As smolagents 1.26 has it: text collected call by call, one bool for the batch."""

    def __init__(self, stop_strings: list[str], tokenizer: Any) -> None:
        self.stop_strings, self.tokenizer, self.stream = stop_strings, tokenizer, ""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        self.stream += self.tokenizer.decode(input_ids[0][-1], skip_special_tokens=True)
        return any(self.stream.endswith(text) for text in self.stop_strings)


class MultiTokenEOS(StoppingCriteria):
    """As lm-evaluation-harness 0.4 has it: which rows are done is kept in the criterion, one bool for the batch."""

    def __init__(self, sequence: str, tokenizer: Any, start: int, batch_size: int) -> None:
        self.start, self.done, self.sequence, self.tokenizer = start, [False] * batch_size, sequence, tokenizer

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :][:, -len(self.sequence) - 2 :])
        self.done = [done or self.sequence in text for done, text in zip(self.done, texts, strict=True)]
        return all(self.done)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["default", "install"])
def test_as_smolagents_calls(strategy: str, way: str, stream: bool, byte_tokenizer: Any) -> None:
    model, ids = speaking_target(), byte_tokenizer("Hello", return_tensors="pt").input_ids
    text = byte_tokenizer.decode(model.generate(ids, **SETTINGS)[0, 5:])
    head = assistant(strategy, model)
    extra = {} if way == "default" else {"assistant_model": head, "speculative": strategy}

    def call(**more: Any) -> torch.Tensor:
        criteria = StoppingCriteriaList([StopOnStrings([text[6:8]], byte_tokenizer)])
        return model.generate(
            inputs=ids, use_cache=True, stopping_criteria=criteria, max_new_tokens=14, do_sample=False, **more
        )

    expected = call()
    assert expected.shape[1] < 5 + 14
    streamer = TextIteratorStreamer(byte_tokenizer, skip_prompt=True, timeout=60) if stream else None
    if way == "default":
        enable_speculation(model, head, strategy)
        result = call(streamer=streamer)
    else:
        with install():
            result = call(streamer=streamer, **extra)
    assert result.tolist() == expected.tolist()
    if streamer is not None:
        assert "".join(streamer) == byte_tokenizer.decode(expected[0, 5:])
    speculated(model)


@pytest.mark.parametrize("batch", [1, 3])
def test_as_an_evaluation_harness_calls(strategy: str, batch: int, byte_tokenizer: Any) -> None:
    model = speaking_target()
    inputs = byte_tokenizer(["Hello there", "Yes", "Why?"][:batch], return_tensors="pt", padding=True)
    ids = inputs.input_ids
    texts = byte_tokenizer.batch_decode(model.generate(**inputs, **SETTINGS)[:, ids.shape[1] :])

    def call() -> torch.Tensor:
        criteria = [
            MultiTokenEOS(text, byte_tokenizer, ids.shape[1], batch) for text in (texts[0][5:7], texts[-1][8:10])
        ]
        return model.generate(
            input_ids=ids,
            max_length=ids.shape[1] + 14,
            stopping_criteria=StoppingCriteriaList(criteria),
            pad_token_id=byte_tokenizer.pad_token_id,
            use_cache=True,
            attention_mask=inputs.attention_mask,
            do_sample=False,
        )

    expected = call()
    enable_speculation(model, assistant(strategy, model), strategy)
    assert call().tolist() == expected.tolist()
    speculated(model)


# -- targets under adapters, quantised, dispatched ---------------------------------------------------------------------


@pytest.mark.parametrize("way", ["merged in place", "merged and unloaded", "one of two"])
def test_merged_and_several_adapters(strategy: str, way: str) -> None:
    peft = pytest.importorskip("peft")
    base, inputs = fresh_target("qwen3"), padded_prompt(2)
    before = base.generate(**inputs, **SETTINGS)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "lm_head"], lora_alpha=16)
    model = peft.get_peft_model(base, lora)  # adapted after speculation was enabled
    model.add_adapter("other", lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)
    if way == "one of two":
        model.set_adapter("other")
    elif way == "merged in place":
        model.merge_adapter()
    else:
        model = model.merge_and_unload()
    assert model.generate(**inputs, **SETTINGS).tolist() != before.tolist()
    compare(model, lambda: {**inputs, **SETTINGS}, strategy, head=assistant(strategy, model))
    speculated(model)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_target_quantised_by_torchao(strategy: str, batch: int) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed (extra dev has it)")
    model, inputs = fresh_target("qwen3", seed=3), padded_prompt(batch)
    before = model.generate(**inputs, **SETTINGS, return_dict_in_generate=True, output_logits=True)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    after = model.generate(**inputs, **SETTINGS, return_dict_in_generate=True, output_logits=True)
    assert not torch.equal(before.logits[0], after.logits[0])
    compare(model, lambda: {**inputs, **SETTINGS}, strategy, head=assistant(strategy, model))
    assert speculated(model).accepted > 0


@pytest.mark.parametrize("bits", [8, 4])
def test_a_target_quantised_by_bitsandbytes(strategy: str, bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes (125 MB) is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # its 4-bit product on a CPU: multiples of 32
    fresh_target("llama", seed=3, **sizes).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_8bit=True) if bits == 8 else BitsAndBytesConfig(load_in_4bit=True)
    model = SpeculativeModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    assert "Linear" + ("8bitLt" if bits == 8 else "4bit") == type(model.model.layers[0].mlp.up_proj).__name__
    inputs = padded_prompt(1)
    head = assistant(strategy, model)
    result = model.generate(**inputs, **SETTINGS, assistant_model=head, speculative=strategy)
    assert result.shape[1] == 9 + 14
    speculated(model)


@pytest.mark.parametrize("where", PLACES)
def test_a_target_dispatched_by_accelerate(strategy: str, where: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inputs = fresh_target("qwen3", seed=4, num_hidden_layers=4), padded_prompt(2)
    expected = model.generate(**inputs, **SETTINGS)
    head = assistant(strategy, model)
    layers = {f"model.layers.{i}": "cpu" for i in range(4)}
    if where == "layers on disk":  # weights of two layers are on the meta device between forwards
        layers = {**layers, "model.layers.1": "disk", "model.layers.3": "disk"}
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **layers}
    if where == "all on meta":
        accelerate.cpu_offload(model, execution_device="cpu")  # every weight is on meta, loaded for its forward
    else:
        model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    compare(model, lambda: {**inputs, **SETTINGS}, strategy, head=head)
    assert (
        model.generate(**inputs, **SETTINGS, assistant_model=head, speculative=strategy).tolist() == expected.tolist()
    )
    assert speculated(model).accepted > 0
