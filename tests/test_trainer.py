"""The trainer: a head learns its tiny target, drafts with tau above 1.5, and a killed run goes on unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES

from specdec_hf.heads.dspark import DSparkDraftModel
from specdec_hf.training.features import FeatureCache, target_features
from specdec_hf.training.optim import MuonAdamW, orthogonalised
from specdec_hf.training.rows import collate
from specdec_hf.training.store import Sequence, TokenStore
from specdec_hf.training.trainer import TrainConfig, learning_rate_factor, train

CONFIGS = Path(__file__).parent.parent / "configs"
HEAD = {"block_size": 3, "markov_rank": 8, "target_layer_ids": [0, 2], "num_hidden_layers": 1}


def write_texts(path, target, count=24, length=24) -> TokenStore:
    ids = target.generate(
        torch.randint(3, 96, (count, 4)), do_sample=False, max_new_tokens=length - 4, eos_token_id=None
    )
    store = TokenStore(path, {"seed": 0})
    mask = torch.arange(length) >= 4
    store.append([Sequence(row, mask, number) for number, row in enumerate(ids)], set(range(count)))
    return store


def small(tmp_path, **changes) -> TrainConfig:
    values = {"head": HEAD, "max_steps": 6, "batch_size": 4, "num_anchors": 6, "save_steps": 3, "validation": 4}
    return TrainConfig(data=str(tmp_path / "data"), output=str(tmp_path / "out"), **{**values, **changes})


def test_learns_and_drafts(tiny_target, tmp_path):
    target = tiny_target(num_hidden_layers=3, spread=4.0)
    write_texts(tmp_path / "data", target)
    config = small(tmp_path, head={**HEAD, "target_layer_ids": [0, 1]}, max_steps=150, save_steps=1000, num_anchors=16,
                   batch_size=8, muon_lr=0.05, validation=0)  # fmt: skip
    _, figures = train(target, config)
    assert figures["texts"] == 24 and figures["answer_tokens"] == 480
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "out" / "head")
    text = TokenStore(tmp_path / "data").load()[0].ids[None]
    from specdec_hf import enable_speculation

    enable_speculation(target)
    out = target.generate(
        text[:, :4], assistant_model=loaded, speculative="dspark", do_sample=False, max_new_tokens=20,
        eos_token_id=None, return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, text)
    assert out.speculation.mean_accepted_length > 1.5


@pytest.mark.parametrize("cached", [False, True])
def test_resume_equals_one_run(tiny_target, tmp_path, cached):
    target = tiny_target()
    write_texts(tmp_path / "data", target, count=16, length=16)
    config = small(tmp_path, feature_cache=str(tmp_path / "cache") if cached else None)
    whole, _ = train(target, replace(config, output=str(tmp_path / "whole")))
    part = tmp_path / "whole" / "checkpoint-3"
    (tmp_path / "out").mkdir()
    part.rename(tmp_path / "out" / "checkpoint-3")
    resumed, _ = train(target, config, resume=True)
    for (name, one), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5, msg=name)
    assert json.loads((tmp_path / "out" / "head" / "training.json").read_text())["config"]["max_steps"] == 6
    assert (tmp_path / "out" / "checkpoint-6" / "head" / "model.safetensors").is_file()


def test_features_of_padded_rows_equal_single_ones(tiny_target, tmp_path):
    target = tiny_target()
    rows = [
        {"input_ids": torch.randint(3, 96, (n,)), "loss_mask": torch.ones(n).bool(), "anchors": torch.zeros(1).long()}
        for n in (5, 9)
    ]
    batch = collate(rows)
    both = target_features(target, [0, 2], batch["input_ids"], batch["segments"])
    single = target_features(target, [0, 2], rows[0]["input_ids"][None], torch.ones(1, 5, dtype=torch.bool))
    torch.testing.assert_close(both.taps[:1, :5], single.taps, atol=1e-5, rtol=1e-5)
    assert both.taps.shape == (2, 9, 64) and both.last_hidden.shape == (2, 9, 32)
    plain = target(rows[1]["input_ids"][None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(both.taps[1:], torch.cat([plain[1], plain[3]], -1), atol=1e-5, rtol=1e-5)
    texts = [Sequence(row["input_ids"], row["loss_mask"], 0) for row in rows]
    cache = FeatureCache(tmp_path, texts, [0, 2], target)
    assert cache.bytes_needed() == 14 * 32 * 3 * 2
    cache.fill()
    torch.testing.assert_close(cache.read(1)["taps"].float(), both.taps[1], atol=0.05, rtol=0.02)


def test_cache_that_does_not_fit_is_refused_before_writing(tiny_target, tmp_path, monkeypatch):
    import shutil

    cache = FeatureCache(tmp_path, [Sequence(torch.ones(9).long(), torch.ones(9).bool(), 0)], [0], tiny_target())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(OSError, match="feature cache needs"):
        cache.fill()
    assert not list(tmp_path.iterdir())


def test_optimizer():
    matrix = torch.randn(6, 10)
    values = torch.linalg.svdvals(orthogonalised(matrix, 5))
    assert values.min() > 0.5 and values.max() < 1.3
    torch.testing.assert_close(orthogonalised(matrix.T, 5), orthogonalised(matrix, 5).T)
    rough = orthogonalised(matrix, 5, torch.bfloat16)
    assert rough.dtype == torch.bfloat16 and (rough - orthogonalised(matrix, 5)).abs().max() < 0.1
    layers = torch.nn.ModuleDict({"layers": torch.nn.Linear(4, 4), "norm": torch.nn.LayerNorm(4)})
    for every in (1, 2):
        optimizer = MuonAdamW(layers, every=every)
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
        before = [parameter.clone() for parameter in layers.parameters()]
        for _ in range(2):
            layers["norm"](layers["layers"](torch.randn(8, 4))).square().mean().backward()
            optimizer.step()
        assert all(not torch.equal(old, new) for old, new in zip(before, layers.parameters(), strict=True))
    with pytest.raises(ValueError, match="lr=0"):
        MuonAdamW(layers, lr=0)


def test_adamw_equals_torch():
    torch.manual_seed(1)
    ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    one, other = (
        MuonAdamW(ours, lr=1e-2),
        torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0),
    )
    for _ in range(5):
        x = torch.randn(4, 3)
        for model, optimizer in ((ours, one), (theirs, other)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


def test_schedule():
    factors = [learning_rate_factor(step, 100, 10, 0.5) for step in range(101)]
    assert factors[0] == 0.1 and factors[9] == 1.0 and factors[50] == 1.0 and factors[75] == 0.5 and factors[100] == 0.0


def test_bad_configurations(tiny_target, tmp_path):
    with pytest.raises(ValueError, match="max_steps=0"):
        small(tmp_path, max_steps=0)
    (tmp_path / "x.yaml").write_text("train:\n  data: d\n  output: o\n  max_step: 5\n")
    with pytest.raises(ValueError, match="did you mean 'max_steps'"):
        TrainConfig.from_yaml(tmp_path / "x.yaml")
    (tmp_path / "y.yaml").write_text("train:\n  data: d\n")
    with pytest.raises(ValueError, match="output not given"):
        TrainConfig.from_yaml(tmp_path / "y.yaml")
    TokenStore(tmp_path / "data", {}).append([Sequence(torch.tensor([1, 500, 3]), torch.ones(3).bool(), 0)], {0})
    with pytest.raises(ValueError, match="ids up to 500"):
        train(tiny_target(), small(tmp_path))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_configs_are_read(path):
    import yaml

    if "train" in (yaml.safe_load(path.read_text()) or {}):
        TrainConfig.from_yaml(path, data="d", output="o")


def test_recipe_end_to_end_and_again(tiny_target, byte_tokenizer, tmp_path):
    from specdec_hf.training.recipe import run

    target = tiny_target(vocab_size=260, spread=1.5, max_position_embeddings=1024)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"turns": [f"question {n}"]}) for n in range(12)))
    (tmp_path / "held.jsonl").write_text(json.dumps({"turns": ["Question 3"]}))
    recipe = f"""
target: {tmp_path / "target"}
data:
  prompts: [p.jsonl]
  exclude: [held.jsonl]
  docstring_prompts: 2
  max_tokens: 150
  sampling: {{batch_size: 4, max_new_tokens: 20, max_prompt_tokens: 700}}
train:
  head: {{block_size: 3, markov_rank: 4, target_layer_ids: [0, 2], draft_vocab_size: 100}}
  max_steps: 4
  save_steps: 2
  num_anchors: 4
  validation: 2
  feature_cache: features
"""
    (tmp_path / "r.yaml").write_text(recipe)
    lines: list[str] = []
    figures = run(tmp_path / "r.yaml", tmp_path / "out", lines.append)
    assert figures["answer_tokens"] >= 150 and 0 < figures["coverage"] <= 1
    assert not any("uestion 3" in byte_tokenizer.decode(item.ids) for item in TokenStore(tmp_path / "out" / "texts"))
    DSparkDraftModel.from_pretrained(tmp_path / "out" / "head").bind(target)
    assert run(tmp_path / "r.yaml", tmp_path / "out")["answer_tokens"] == figures["answer_tokens"]
    for bad, match in (("max_tokens", "max_token"), ("max_new_tokens", "max_new")):
        (tmp_path / "bad.yaml").write_text(recipe.replace(bad + ":", match + ":"))
        with pytest.raises(ValueError, match=match):
            run(tmp_path / "bad.yaml", tmp_path / "no")
    assert not (tmp_path / "no").exists()


MORE_FAMILIES = {
    "qwen2": ("qwen2", {}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "hidden_size": 36, "num_attention_heads": 9, "head_dim": 4,
                          "num_key_value_heads": 3}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}  # fmt: skip


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_families_train_and_decode_losslessly(tiny_target, tmp_path, monkeypatch, family):
    from specdec_hf import enable_speculation

    kind, shape = MORE_FAMILIES.get(family, (family, {}))
    monkeypatch.setitem(FAMILIES, kind, FAMILIES.get(kind, {}))
    target = tiny_target(kind, **shape)
    write_texts(tmp_path / "data", target, count=6, length=14)
    train(target, small(tmp_path, max_steps=2, num_anchors=4, validation=0, batch_size=3))
    head = DSparkDraftModel.from_pretrained(tmp_path / "out" / "head")
    prompt = torch.randint(3, 96, (1, 5))
    plain = target.generate(prompt, do_sample=False, max_new_tokens=12)
    enable_speculation(target)
    drafted = target.generate(prompt, assistant_model=head, speculative="dspark", do_sample=False, max_new_tokens=12)
    assert torch.equal(plain, drafted)
