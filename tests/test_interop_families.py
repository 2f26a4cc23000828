"""Layouts beside Qwen3's: Gemma 4 heads, transformers' DFlash, DFlash out. Compared with transformers' own modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.muse_glimmer_assistant import modeling_muse_glimmer_assistant as muse

from specdec_hf import DSparkConfig, DSparkDraftModel, enable_speculation, last_speculation
from specdec_hf._hf import CACHE_KEY
from specdec_hf.interop.convert import convert
from specdec_hf.interop.engines import serve_command
from specdec_hf.interop.formats import Answers
from specdec_hf.interop.info import describe
from specdec_hf.interop.reading import read_head

QWEN = str(Path(__file__).parent / "golden" / "deepspec" / "target")
GEMMA4: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 20.0,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "12B": {},
    "E2B": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 2},
    "26B-A4B": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}


def gemma4(**overrides: Any) -> Any:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**{**GEMMA4, **overrides})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
        model.get_output_embeddings().weight.mul_(8.0)
    return model


@pytest.mark.parametrize("kind", ["llama", "gemma4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gemma4_targets_decode_losslessly(variant: str, kind: str) -> None:
    """The taps lie in the layers that share keys too (E2B), where a prefill keeps only the wanted positions."""
    target = enable_speculation(gemma4(**VARIANTS[variant]))
    fields: dict[str, Any] = {"block_size": 4, "markov_rank": 4, "target_layer_ids": [0, 2], "layer_kind": kind}
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, **fields)).eval()
    assert head.config.head_dim == (16 if kind == "gemma4" else 8)
    ids = torch.randint(3, 96, (2, 21))
    inputs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 24}
    want = target.generate(ids, **inputs)
    assert torch.equal(target.generate(ids, assistant_model=head, **inputs), want)
    stats = last_speculation(target)
    assert stats is not None
    assert stats.rounds > 0
    assert len(set(want[0].tolist())) > 8


# -- Gemma 4 heads ---------------------------------------------------------------------------------------------------

DRAFT: dict[str, Any] = {
    "block_size": 4,
    "mask_token_id": 4,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
    "num_anchors": 8,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


class Behind:
    """Stands for a cache: the context's keys and values, given beforehand, before those of the block."""

    def __init__(self, held: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.held = held

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, **_: Any) -> Any:
        return torch.cat((self.held[layer][0], keys), 2), torch.cat((self.held[layer][1], values), 2)


class Reference:
    """A Gemma 4 DSpark backbone out of transformers' own decoder layers, and its checkpoint in DeepSpec's format."""

    def __init__(self, directory: Path, k_eq_v: bool = True) -> None:
        torch.manual_seed(2)
        draft = {**GEMMA4, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "attention_k_eq_v": k_eq_v}
        self.config = Gemma4TextConfig(**draft, attn_implementation="eager")
        self.layers = [Gemma4TextDecoderLayer(self.config, i).eval() for i in range(2)]
        self.rotary = Gemma4TextRotaryEmbedding(self.config)
        self.tensors = {
            "embed_tokens.weight": torch.randn(96, 32),
            "lm_head.weight": torch.randn(96, 32),
            "fc.weight": torch.randn(32, 64) / 8,
            "hidden_norm.weight": torch.rand(32) + 0.5,
            "norm.weight": torch.rand(32) + 0.5,
            "markov_head.markov_w1.weight": torch.randn(96, 6),
            "markov_head.markov_w2.weight": torch.randn(96, 6),
            "confidence_head.proj.weight": torch.randn(1, 38),
            "confidence_head.proj.bias": torch.randn(1),
        }
        for index, layer in enumerate(self.layers):
            with torch.no_grad():
                for name, tensor in layer.state_dict().items():
                    fresh = torch.randn_like(tensor) / 4 if tensor.ndim > 1 else torch.rand_like(tensor) + 0.5
                    self.tensors[f"layers.{index}.{name}"] = tensor.copy_(fresh).clone()
        fields = {**draft, **DRAFT, "model_type": "gemma4_text", "architectures": ["Gemma4DSparkModel"]}
        fields |= {"rope_parameters": self.config.rope_parameters, "hidden_activation": "gelu_pytorch_tanh"}
        fields |= {"rms_norm_eps": 1e-6, "dtype": "float32", "enable_moe_block": False, "num_kv_shared_layers": 0}
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(fields))
        save_file(self.tensors, directory / "model.safetensors")

    def norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        return hidden * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.tensors[f"{name}.weight"]

    @torch.no_grad()
    def round(self, taps: torch.Tensor, anchor: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and base logits of a block behind the context."""
        length = taps.shape[1]
        context = self.norm(taps @ self.tensors["fc.weight"].T, "hidden_norm")
        positions = torch.arange(length + 4)[None]
        cos, sin = self.rotary(context, positions, "full_attention")
        held = []
        for layer in self.layers:
            attention = layer.self_attn
            keys = attention.k_proj(context).view(1, length, -1, 16)
            values = keys if attention.v_proj is None else attention.v_proj(context).view(1, length, -1, 16)
            keys = apply_rotary_pos_emb(attention.k_norm(keys), cos[:, :length], sin[:, :length], unsqueeze_dim=2)
            held.append((keys.transpose(1, 2), attention.v_norm(values).transpose(1, 2)))
        hidden = self.tensors["embed_tokens.weight"][[anchor, 4, 4, 4]][None] * 32**0.5
        for layer in self.layers:
            block = {"position_embeddings": (cos[:, length:], sin[:, length:]), "shared_kv_states": {}}
            mask = torch.zeros(1, 1, 4, length + 4)
            hidden = layer(hidden.clone(), attention_mask=mask, **{CACHE_KEY: Behind(held)}, **block)
        hidden = self.norm(hidden, "norm")
        logits = hidden @ self.tensors["lm_head.weight"].T
        return hidden, torch.tanh(logits / 20.0) * 20.0


def first_round(head: Any, taps: torch.Tensor, anchor: int) -> tuple[torch.Tensor, torch.Tensor]:
    context, length = head.new_context(1), taps.shape[1]
    head.extend_context(context, taps, torch.arange(length)[None])
    return head.draft_block(context, torch.tensor([anchor]), torch.tensor([length]))


@pytest.mark.parametrize("k_eq_v", [True, False])
def test_deepspec_gemma4_head_equals_transformers_layers(k_eq_v: bool, tmp_path: Path) -> None:
    reference = Reference(tmp_path / "deepspec", k_eq_v)
    taps = torch.randn(1, 11, 64)
    want = reference.round(taps, 7)
    convert(str(tmp_path / "deepspec"), str(tmp_path / "own"))
    for source in ("deepspec", "own"):
        head = DSparkDraftModel.from_pretrained(tmp_path / source)
        for got, right in zip(first_round(head, taps, 7), want, strict=True):
            torch.testing.assert_close(got, right, atol=2e-5, rtol=1e-5)
    anchors = torch.tensor([[11]])  # in training the same block comes out
    ids = torch.full((1, 12), 7)
    trained = head(ids, torch.cat((taps, taps[:, :1]), 1), anchors)
    torch.testing.assert_close(trained.base_logits[0], want[1], atol=2e-5, rtol=1e-5)


def test_gemma4_round_trip_and_what_readers_need(tmp_path: Path) -> None:
    Reference(tmp_path / "deepspec")
    gemma4().save_pretrained(tmp_path / "target")
    convert(str(tmp_path / "deepspec"), str(tmp_path / "own"))
    with pytest.raises(ValueError, match="give --target"):
        convert(str(tmp_path / "own"), str(tmp_path / "no"), "deepspec")
    with pytest.raises(ValueError, match="layer_kind='gemma4'"):
        convert(str(tmp_path / "own"), str(tmp_path / "no"), "speculators", str(tmp_path / "target"))
    assert convert(str(tmp_path / "own"), str(tmp_path / "back"), "deepspec", str(tmp_path / "target")) == []
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("deepspec", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    theirs, ours = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("deepspec", "back"))
    for name in ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "final_logit_softcapping"):
        assert ours[name] == theirs[name]
    assert ours["rope_parameters"]["full_attention"] == theirs["rope_parameters"]["full_attention"]
    assert (ours["model_type"], ours["architectures"]) == ("gemma4_text", ["Gemma4DSparkModel"])
    parsed = AutoConfig.from_pretrained(tmp_path / "back")  # vLLM reads the layers through transformers' class
    assert parsed.per_layer_config[1].head_dim == 16
    assert parsed.target_layer_ids == [0, 2]
    assert serve_command(str(tmp_path / "target"), str(tmp_path / "back"))[0].startswith("vllm serve")
    Reference(tmp_path / "separate", k_eq_v=False)
    with pytest.raises(ValueError, match="attention_k_eq_v"):
        serve_command(str(tmp_path / "target"), str(tmp_path / "separate"))
    notes = convert(str(tmp_path / "separate"), str(tmp_path / "out"), "deepspec", str(tmp_path / "target"))
    assert "attention_k_eq_v" in " ".join(notes)


def test_gemma4_embeddings_are_scaled_once(tmp_path: Path) -> None:
    """Its own rows are scaled by the head, the target's by the target's module; both ways the same drafts."""
    target = gemma4()
    target.save_pretrained(tmp_path / "target")
    reference = Reference(tmp_path / "whole")
    theirs = {
        "embed_tokens.weight": target.model.embed_tokens.weight.data,
        "lm_head.weight": target.lm_head.weight.data,
    }
    save_file({**reference.tensors, **theirs}, tmp_path / "whole" / "model.safetensors")
    Reference(tmp_path / "bare")
    kept = {name: tensor for name, tensor in reference.tensors.items() if name not in theirs}
    save_file(kept, tmp_path / "bare" / "model.safetensors")
    whole = DSparkDraftModel.from_pretrained(tmp_path / "whole")
    bare = DSparkDraftModel.from_pretrained(tmp_path / "bare").bind(target)
    assert (whole.config.embedding_scale, bare.config.embedding_scale) == (32**0.5, 1.0)
    taps = torch.randn(1, 6, 64)
    for left, right in zip(first_round(whole, taps, 9), first_round(bare, taps, 9), strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    convert(str(tmp_path / "bare"), str(tmp_path / "filled"), "deepspec", str(tmp_path / "target"))
    written = load_file(tmp_path / "filled" / "model.safetensors")
    assert all(torch.equal(written[name], rows) for name, rows in theirs.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_head_dim": None}, "global_head_dim"),
        ({"num_global_key_value_heads": None}, "num_global_key_value_heads"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"enable_moe_block": True}, "experts"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_gemma4_unknowns_are_asked_for(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    Reference(tmp_path / "in")
    fields = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(ValueError, match=message):
        DSparkDraftModel.from_pretrained(tmp_path / "in")


# -- transformers' DFlash assistant ----------------------------------------------------------------------------------


def assistant(directory: Path, **overrides: Any) -> Any:
    torch.manual_seed(4)
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "block_size": 5,
        "mask_token_id": 97,
        "target_layer_ids": [0, 3],
        **overrides,
    }
    model = muse.MuseGlimmerAssistantModel(muse.MuseGlimmerAssistantConfig(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("kinds", [("sliding_attention", "full_attention"), ("sliding_attention",) * 2])
def test_transformers_dflash_equals_its_own_model(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Sliding layers too, beyond the window: each slot's window ends at itself."""
    theirs = assistant(tmp_path / "in", layer_types=list(kinds))
    convert(str(tmp_path / "in"), str(tmp_path / "own"), target=QWEN)
    target = AutoModelForCausalLM.from_pretrained(QWEN)
    head = DSparkDraftModel.from_pretrained(tmp_path / "own").bind(target)
    assert (head.max_draft_tokens, head.config.target_layer_ids) == (4, [0, 3])
    taps = torch.randn(1, 15, 128)
    block = target.get_input_embeddings()(torch.tensor([[11, 97, 97, 97, 97]]))
    cache = muse.DFlashCache(config=theirs.config)
    cache.set_previous_accepted_tokens(15)
    with torch.no_grad():
        want = theirs(block, taps, position_ids=torch.arange(20)[None], **{CACHE_KEY: cache}).last_hidden_state[:, 1:]
        got, logits = first_round(head, taps, 11)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits, target.lm_head(want), atol=1e-4, rtol=1e-4)
        context = head.new_context(2)  # rows of different lengths take another path to the same numbers
        head.extend_context(context, torch.cat((taps, taps)), torch.arange(15).expand(2, -1), torch.tensor([15, 9]))
        ragged, _ = head.draft_block(context, torch.tensor([11, 11]), torch.tensor([15, 9]))
        torch.testing.assert_close(ragged[:1], want, atol=1e-5, rtol=1e-5)
        fewer, _ = head.draft_block(context, torch.tensor([11, 11]), torch.tensor([15, 9]), num_tokens=2)
        torch.testing.assert_close(fewer[:1], want[:, :2], atol=1e-5, rtol=1e-5)
        ids = torch.full((1, 16), 11)
        trained = head(ids, torch.cat((taps, taps[:, :1]), 1), torch.tensor([[15]]))
        torch.testing.assert_close(trained.hidden_states[:, 0], want, atol=1e-5, rtol=1e-5)


def test_transformers_dflash_decodes_and_says_what_is_missing(tmp_path: Path) -> None:
    assistant(tmp_path / "in")
    for call in (read_head, describe):
        with pytest.raises(ValueError, match="--target"):
            call(str(tmp_path / "in"))
    with pytest.raises(ValueError, match="specdec convert"):
        DSparkDraftModel.from_pretrained(tmp_path / "in")
    with pytest.raises(ValueError, match="runs it there"):
        serve_command(QWEN, str(tmp_path / "in"))
    assert "transformers' DFlash" in describe(str(tmp_path / "in"), target=QWEN)
    convert(str(tmp_path / "in"), str(tmp_path / "own"), target=QWEN)
    target = enable_speculation(AutoModelForCausalLM.from_pretrained(QWEN))
    head = DSparkDraftModel.from_pretrained(tmp_path / "own")
    ids = torch.randint(3, 90, (1, 12))
    want = target.generate(ids, do_sample=False, max_new_tokens=12)
    assert torch.equal(target.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=head), want)
    stats = last_speculation(target)
    assert stats is not None
    assert stats.rounds > 0
    with pytest.raises(ValueError, match=r"sliding_window|embedding_norm"):
        convert(str(tmp_path / "own"), str(tmp_path / "no"), "zlab", QWEN)


def muse_glimmer() -> Any:
    """A tiny target whose text holds two words only, so that an untrained draft is often right."""
    small: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 5}
    text = {**small, "vocab_size": 98, "hidden_size": 64, "intermediate_size": 96, "sliding_window": 64}
    text |= {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "eos_token_id": None, "pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    others = {"image_token_id": 95, "video_token_id": 94, "out_hidden_size": 64, "projector_hidden_size": 32}
    config = AutoConfig.for_model("muse_glimmer", text_config=text, vision_config=vision, **others)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
        words = torch.zeros(98, 1)
        words[[5, 6]] = 6.0
        model.get_output_embeddings().weight.mul_(words)
    return model


@pytest.mark.parametrize("window", [64, 8])
def test_rounds_are_those_of_transformers_own_dflash(window: int, tmp_path: Path) -> None:
    """The same pair through transformers' own DFlash decoding needs the same number of forwards, within the window and
    beyond it: what was drafted is the same.
    """
    target = muse_glimmer()
    target.save_pretrained(tmp_path / "target")
    theirs = assistant(tmp_path / "in", sliding_window=window, target_layer_ids=[0, 2])
    convert(str(tmp_path / "in"), str(tmp_path / "own"), target=str(tmp_path / "target"))
    ids, options = torch.randint(3, 90, (1, 12)), {"do_sample": False, "max_new_tokens": 60}
    want = target.generate(ids, **options)
    calls: list[int] = []
    target.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(target.generate(ids, assistant_model=theirs, speculation_type="dflash", **options), want)
    native = len(calls)
    calls.clear()
    head = DSparkDraftModel.from_pretrained(tmp_path / "own")
    assert torch.equal(enable_speculation(target).generate(ids, assistant_model=head, **options), want)
    assert len(calls) == native
    stats = last_speculation(target)
    assert stats is not None
    assert 5 < stats.rounds < 55


def test_bare_embeddings_of_a_target_that_norms_them(tmp_path: Path) -> None:
    assistant(tmp_path / "in")
    convert(str(tmp_path / "in"), str(tmp_path / "own"), target=QWEN)
    target = AutoModelForCausalLM.from_pretrained(QWEN)
    head = DSparkDraftModel.from_pretrained(tmp_path / "own").bind(target)
    module = target.get_input_embeddings()
    module.embed_norm = torch.nn.Identity()
    module.register_forward_hook(lambda module, args, output: output * 3)
    ids = torch.tensor([5, 6])
    assert torch.equal(head._embed(ids), module.weight[ids])
    head.config.embedding_norm = True
    assert torch.equal(head._embed(ids), module.weight[ids] * 3)


# -- DFlash out ------------------------------------------------------------------------------------------------------


def dflash(directory: Path, **overrides: Any) -> str:
    fields = {"block_size": 4, "markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}
    config = AutoConfig.from_pretrained(QWEN)
    head = DSparkDraftModel(DSparkConfig.for_target(config, mask_token_id=97, **{**fields, **overrides}))
    head.save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_dflash_goes_out_and_comes_back(layout: str, tmp_path: Path) -> None:
    own = dflash(tmp_path / "own")
    notes = convert(own, str(tmp_path / "out"), layout, QWEN)
    assert not [note for note in notes if "rank 0" in note]
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    if layout == "zlab":
        assert fields["dflash_config"] == {"mask_token_id": 97, "target_layer_ids": [1, 2, 3]}
    else:
        assert (fields["speculators_model_type"], fields["sample_from_anchor"]) == ("dflash", False)
        assert fields["sliding_window_non_causal"] is True  # false makes all layers causal in vLLM
        assert not [name for name in fields if "markov" in name or "confidence" in name]
        del fields["sample_from_anchor"]  # all programs take it as false in a DFlash head
        (tmp_path / "out" / "config.json").write_text(json.dumps(fields))
    convert(str(tmp_path / "out"), str(tmp_path / "back"), target=QWEN)
    first, last = (read_head(str(tmp_path / name)) for name in ("own", "back"))
    assert all(torch.equal(tensor, last.tensors[name]) for name, tensor in first.tensors.items())
    ours, theirs = first.config.to_dict(), last.config.to_dict()
    differing = {name for name in ours if ours[name] != theirs[name]} - {"target_name_or_path", "num_anchors"}
    assert not differing, differing
    line, _ = serve_command(QWEN, str(tmp_path / "out"))
    assert '"method": "dflash"' in line


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sample_from_anchor": True}, "only its mask slots predict"),
        ({"markov_rank": 4}, "no Markov head"),
        ({"enable_confidence_head": True}, "no confidence head"),
        ({"has_lm_head": True}, "differs from"),
    ],
)
def test_what_zlab_cannot_hold_is_refused(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    own = dflash(tmp_path / "own", **overrides)
    with pytest.raises(ValueError, match=message):
        convert(own, str(tmp_path / "out"), "zlab", QWEN, Answers())
