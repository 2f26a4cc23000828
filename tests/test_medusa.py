"""Medusa: the sparse tree, the published checkpoints, what the drafter draws, and training until siblings pay."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_trainer import small, write_texts

from specdec_hf import MedusaConfig, MedusaHead, SpeculativeConfig, enable_speculation, last_speculation
from specdec_hf.drafters import medusa
from specdec_hf.targets import TapRecorder
from specdec_hf.training.medusa import measure_held_out, new_medusa_head
from specdec_hf.training.store import TokenStore
from specdec_hf.training.trainer import train
from specdec_hf.tree import best_tree, chance_of, parents_of

sys.path.insert(0, str(Path(__file__).parent / "contract"))
from test_distribution import CASES, PASSES, PROMPT, exact_joint, fit, options_of, sample, small_target


def random_head(target: Any, std: float = 0.3, **fields: Any) -> MedusaHead:
    head = MedusaHead(MedusaConfig.for_target(target.config, **{"medusa_num_heads": 3, **fields})).eval()
    for block in head.blocks:
        torch.nn.init.normal_(block[0].linear.weight, std=std)
    if head.config.has_reduced_vocab:
        head.set_draft_vocabulary(torch.tensor([0, 2, 3, 5, 7]))
    return head


# -- the tree ---------------------------------------------------------------------------------------------------------


def test_the_best_tree_of_n_nodes():
    shares = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05], [0.3, 0.01, 0.2]]
    everything = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    for nodes in range(1, 20):
        tree = best_tree(shares, nodes)
        assert len(set(tree)) == nodes
        for place, path in enumerate(tree):  # behind its parent and its better siblings
            assert path[:-1] == () or path[:-1] in tree[:place]
            assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree[:place]
        expected = sorted((chance_of(path, shares) for path in everything), reverse=True)[:nodes]
        assert sum(chance_of(path, shares) for path in tree) == pytest.approx(sum(expected))
    assert parents_of([(0,), (1,), (0, 0), (1, 0), (0, 0, 2)]) == [-1, -1, 0, 1, 2]
    assert len(best_tree([[0.5]], 9)) == 1


def test_measured_accuracies_choose_the_tree():
    target = enable_speculation(small_target())
    head = random_head(target)
    text = torch.randint(0, 8, (200,))
    mask = torch.arange(200) >= 50
    shares = medusa.measure(head, target, [text], [mask], ranks=3)
    states = target.model(text[None]).last_hidden_state[0]
    for k in range(3):
        guesses = head(states, k).topk(3).indices
        hits = [sum(int(guesses[t, r] == text[t + 2 + k]) for t in range(48 - k, 198 - k)) / 150 for r in range(3)]
        assert shares[k] == pytest.approx(hits, abs=1e-4)
    head.config.rank_accuracies = [[0.1, 0.08, 0.05], [0.9], [0.1]]
    drafter = medusa.MedusaDrafter.create(head, target, SpeculativeConfig(strategy="medusa"))
    assert drafter._paths[:6] == [(0,), (0, 0), (1,), (1, 0), (2,), (2, 0)], "wide at first, since that pays here"


# -- configuration and files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"medusa_num_heads": 0}, "medusa_num_heads=0"),
        ({"draft_vocab_size": 99}, "draft_vocab_size=99"),
        ({"rank_accuracies": [[0.5]]}, "must hold 4"),
        ({"rank_accuracies": [[0.5], [], [2.0], [0.1]]}, "must hold 4"),
        ({"speculative_strategy": "dspark"}, "medusa"),
    ],
)
def test_wrong_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        MedusaConfig(vocab_size=96, **fields)


def test_unknown_field_and_wrong_target(tiny_target):
    target = tiny_target()
    with pytest.raises(ValueError, match="num_heads"):
        MedusaConfig.for_target(target.config, num_heads=3)
    with pytest.raises(ValueError, match="must agree"):
        MedusaHead(MedusaConfig(vocab_size=96, hidden_size=16)).bind(target)
    with pytest.raises(TypeError, match="needs a MedusaHead"):
        target = enable_speculation(target)
        target.generate(torch.ones(1, 3, dtype=torch.long), assistant_model=target, speculative="medusa")


@pytest.mark.parametrize(
    "fields", [{}, {"draft_vocab_size": 5, "rank_accuracies": [[0.5], [0.4], [0.3]]}, {"has_lm_head": True}]
)
def test_saved_and_loaded(fields, tmp_path):
    target = small_target()
    head = random_head(target, **fields)
    head.save_pretrained(tmp_path)
    from transformers import AutoModel

    for loaded in (MedusaHead.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        hidden = torch.randn(2, 16)
        assert torch.equal(loaded.bind(target)(hidden), head.bind(target)(hidden))
        assert loaded.config.accuracies == head.config.accuracies
    names = set(head.state_dict())
    assert not any("lm_head" in name for name in names) or fields.get("has_lm_head"), "nothing borrowed is saved"


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_published_layout(kind, prefix, tmp_path):
    torch.manual_seed(1)
    tensors = {}
    for head in range(3):
        for layer in range(2):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = torch.randn(16, 16)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = torch.randn(16)
        tensors[f"{prefix}{head}.2.weight"] = torch.randn(8, 16)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if kind == "pt":
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
        with pytest.warns(UserWarning, match="weights_only=True"):
            head = MedusaHead.from_pretrained(tmp_path)
    else:
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
        head = MedusaHead.from_pretrained(tmp_path)
    assert head.config.medusa_num_heads == 2 and head.config.target_name_or_path == "lmsys/vicuna-7b-v1.3"
    hidden = torch.randn(4, 16)
    for k in range(2):  # as the published code computes it
        state = hidden
        for layer in range(2):
            part = f"{prefix}{k}.{layer}.linear"
            state = state + torch.nn.functional.silu(state @ tensors[f"{part}.weight"].T + tensors[f"{part}.bias"])
        torch.testing.assert_close(head(hidden)[:, k], state @ tensors[f"{prefix}{k}.2.weight"].T)
    target = small_target()
    ids = torch.tensor([PROMPT])
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    head.config.target_name_or_path = None
    assert target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=head).tolist() == plain.tolist()


class Planted:
    def __reduce__(self) -> Any:
        return print, ("code from a pickle ran",)


def test_damaged_and_hostile_files(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 1}))
    torch.save({"0.0.linear.weight": Planted()}, tmp_path / "medusa_head.pt")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="tensors alone"):
        MedusaHead.from_pretrained(tmp_path)
    assert "ran" not in capsys.readouterr().out
    for tensors, message in (
        ({"0.0.linear.weight": torch.ones(4, 4)}, "no projection"),
        ({"0.1.weight": torch.ones(8, 4)}, "missing"),
        ({"layers.0": torch.ones(4, 4)}, "not a tensor of Medusa"),
    ):
        torch.save(tensors, tmp_path / "medusa_head.pt")
        with pytest.warns(UserWarning), pytest.raises(ValueError, match=message):
            MedusaHead.from_pretrained(tmp_path)


# -- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("compiled", [False, True])
def test_last_hidden_state_is_tapped(family, compiled, tiny_target, monkeypatch):
    """The tap one past the last layer is what lm_head reads: behind the final norm."""
    target = tiny_target(family)
    if compiled:
        monkeypatch.setattr("specdec_hf.targets.is_compiled", lambda model: True)
    layers = target.config.num_hidden_layers
    ids = torch.randint(3, 96, (2, 7))
    with torch.no_grad(), TapRecorder(target, [0, layers]) as recorder:
        output = target(ids, **recorder.forward_kwargs)
        first, last = recorder.collect(output)
        expected = target(ids, output_hidden_states=True)
    torch.testing.assert_close(last, expected.hidden_states[-1])
    torch.testing.assert_close(first, expected.hidden_states[1])
    logits = target.get_output_embeddings()(last)
    cap = getattr(target.config, "final_logit_softcapping", None)
    torch.testing.assert_close(logits if cap is None else torch.tanh(logits / cap) * cap, expected.logits)


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 5}], ids=["all", "reduced"])
@pytest.mark.parametrize("case", ["plain", "top_k", "combined"])
def test_sampling_is_exact(case, fields):
    target = small_target()
    head = random_head(target, std=0.6, **fields)
    tokens = sample(target, head, speculative="medusa", **options_of(case))
    assert fit(tokens, exact_joint(target, PROMPT, CASES[case][1])) > PASSES
    assert max(map(max, last_speculation(target).accepted_lengths)) > 2


def test_coupled_noise_gives_the_same_text():
    target = small_target()
    head = random_head(target, std=0.6)
    ids = torch.tensor([PROMPT] * 4)
    config = SpeculativeConfig(strategy="medusa", coupling="gumbel", seed=[1, 2, 3, 4])
    kwargs = {"assistant_model": head, "do_sample": True, "max_new_tokens": 20, "top_k": 0}
    texts = target.generate(ids, speculative=config, **kwargs)
    assert last_speculation(target).mean_accepted_length > 1.1
    for nodes in (1, 5):
        assert target.generate(ids, speculative=config, num_assistant_tokens=nodes, **kwargs).tolist() == texts.tolist()
    single = SpeculativeConfig(strategy="medusa", coupling="gumbel", seed=3)
    assert target.generate(ids[:1], speculative=single, **kwargs).tolist() == texts[2:3].tolist()


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"has_lm_head": True, "draft_vocab_size": 64}], ids=["borrowed", "own"])
def test_learns_and_drafts(fields, tiny_target, tmp_path):
    target = tiny_target(num_hidden_layers=3, spread=4.0)
    write_texts(tmp_path / "data", target)
    config = small(tmp_path, head={}, max_steps=240, save_steps=1000, num_anchors=16, batch_size=8, lr=0.01,
                   validation=4, loss={"ce": 1.0, "tv": 0.5, "decay": 3.0})  # fmt: skip
    head = new_medusa_head(target, {"medusa_num_heads": 3, **fields}, TokenStore(tmp_path / "data").load())
    head, _ = train(target, config, head)
    measure_held_out(head, target, config)
    loaded = MedusaHead.from_pretrained(tmp_path / "out" / "head")
    assert loaded.config.rank_accuracies == head.config.rank_accuracies is not None
    text = TokenStore(tmp_path / "data").load()[0].ids[None]
    enable_speculation(target)
    figures = {}
    for nodes in (3, 12):
        out = target.generate(
            text[:, :4], assistant_model=loaded, do_sample=False, max_new_tokens=20, num_assistant_tokens=nodes,
            eos_token_id=None, return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(out.sequences, text)
        figures[nodes] = out.speculation.mean_accepted_length
    assert figures[12] > 1.5 and figures[12] >= figures[3]


def test_recipe(tiny_target, byte_tokenizer, tmp_path):
    from specdec_hf.training.recipe import run

    tiny_target(vocab_size=260, spread=1.5, max_position_embeddings=1024).save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"turns": [f"question {n}"]}) for n in range(12)))
    recipe = f"""
target: {tmp_path / "target"}
strategy: medusa
data:
  prompts: [p.jsonl]
  max_tokens: 150
  sampling: {{batch_size: 4, max_new_tokens: 20, max_prompt_tokens: 700}}
train:
  head: {{medusa_num_heads: 2, draft_vocab_size: 100}}
  max_steps: 2
  save_steps: 2
  num_anchors: 4
  validation: 2
  feature_cache: features
"""
    (tmp_path / "r.yaml").write_text(recipe)
    run(tmp_path / "r.yaml", tmp_path / "out")
    head = MedusaHead.from_pretrained(tmp_path / "out" / "head")
    assert [len(row) for row in head.config.rank_accuracies] == [8, 8]
    (tmp_path / "bad.yaml").write_text(recipe.replace("strategy: medusa", "strategy: medus"))
    with pytest.raises(ValueError, match="choose from dspark, early_exit, medusa"):
        run(tmp_path / "bad.yaml", tmp_path / "no")
