"""Early exit: the first layers draft, nothing is computed twice, the target stays untouched; its head and training.

That the text is right is the contract tests' matter.
"""

from __future__ import annotations

import copy
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, DynamicCache

from specdec_hf import EarlyExitConfig, EarlyExitHead, SpeculativeConfig, enable_speculation, last_speculation
from specdec_hf import early as early_module
from specdec_hf._hf import CACHE_KEY
from specdec_hf.buffers import RowLengths
from specdec_hf.cache import SpeculativeCache
from specdec_hf.drafters import early_exit as drafter_module

sys.path.insert(0, str(Path(__file__).parent / "contract"))
from test_distribution import CASES, PASSES, PROMPT, exact_joint, fit, options_of, sample, small_target


def target_of(family: str = "llama", **overrides: Any) -> Any:
    model = enable_speculation(make_target(family, **overrides))
    model.generation_config.eos_token_id = None
    return model


def head_for(target: Any, exits: tuple[int, ...] = (2,), **fields: Any) -> EarlyExitHead:
    torch.manual_seed(3)
    return EarlyExitHead(EarlyExitConfig.for_target(target.config, exit_layers=list(exits), **fields)).eval()


def texts(target: Any, ids: torch.Tensor, **settings: Any) -> tuple[Any, Any]:
    """Plain and speculative text of one greedy call; the latter without a head unless one is given."""
    own = {name: settings.pop(name) for name in ("assistant_model", "speculative") if name in settings}
    settings = {"do_sample": False, "max_new_tokens": 24, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return target.generate(ids, **settings), target.generate(
            ids, **settings, **{"speculative": "early_exit", **own}
        )


# -- drafting ---------------------------------------------------------------------------------------------------------


def silence_later_layers(target: Any, first: int) -> None:
    """Make the layers from ``first`` on add nothing, so that the target's own exit before them is always right."""
    with torch.no_grad():
        for layer in target.base_model.h[first:] if hasattr(target.base_model, "h") else target.model.layers[first:]:
            for name, parameter in layer.named_parameters():
                if "o_proj" in name or "down_proj" in name or "c_proj" in name or "feedforward_layernorm" in name:
                    parameter.zero_()
                if "post_attention_layernorm" in name and target.config.model_type in ("gemma2", "gemma3_text"):
                    parameter.fill_(-1.0)  # Gemma's norms scale by one plus the weight
                if "post_feedforward_layernorm" in name:
                    parameter.fill_(-1.0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral"])
def test_an_exit_that_knows_everything_is_always_right(family: str, batch: int) -> None:
    """A token read at a wrong place, or its keys lost, and it would err; every round is a whole block."""
    target = target_of(family)
    silence_later_layers(target, 2)
    ids = torch.randint(3, 96, (batch, 11))
    mask = torch.ones_like(ids)
    mask[1:, :4] = 0
    for width in (1, 4):
        config = SpeculativeConfig(strategy="early_exit", assistant_early_exit=2, num_assistant_tokens=width)
        plain, text = texts(target, ids, attention_mask=mask, max_new_tokens=31, speculative=config)
        stats = last_speculation(target)
        assert text.tolist() == plain.tolist()
        assert stats.accepted == stats.drafted > 0
        assert stats.rounds == batch * -(-30 // (width + 1))


def test_no_layer_reads_a_token_twice() -> None:
    target, seen = target_of(), [[], [], [], []]
    for counts, layer in zip(seen, target.model.layers, strict=True):
        layer.register_forward_hook(lambda module, args, output, c=counts: c.append(output.shape[1]))
    projected: list[int] = []
    target.lm_head.register_forward_hook(lambda module, args, output: projected.append(output.shape[:-1].numel()))
    head = head_for(target, (3,))
    target.generate(torch.randint(3, 96, (1, 9)), do_sample=False, max_new_tokens=20, assistant_model=head)
    stats = last_speculation(target)
    blocks = [length + 1 for length in stats.proposal_lengths[0]]
    for early in seen[:3]:
        assert early == [9] + [1] * sum(length + 1 if length else 1 for length in stats.proposal_lengths[0])
    assert seen[3] == [9, *blocks]
    # The borrowed lm_head reads each drafted token once, and the target's own does not beside it.
    assert sum(projected) == 1 + sum(blocks) + stats.drafted


def test_the_states_of_the_first_layers_are_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids = target_of(), torch.randint(3, 96, (1, 9))
    plain, text = texts(target, ids)
    assert text.tolist() == plain.tolist()
    given = early_module._Given.forward
    monkeypatch.setattr(early_module._Given, "forward", lambda *a, **k: torch.zeros_like(given(*a, **k)))
    plain, text = texts(target, ids)
    assert text.tolist() != plain.tolist()


@pytest.mark.parametrize("keeps", [True, False])
def test_windows_are_kept_for_what_is_taken_back(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ahead must not drop slots that the window needs after a rejection, however full the buffer is."""
    if not keeps:
        monkeypatch.setattr(RowLengths, "floor", property(lambda self: None, lambda self, value: None), raising=False)
    source = DynamicCache(config=make_target("mistral", sliding_window=8).config)
    cache, states, returns = SpeculativeCache(source, 500), torch.zeros(1, 2, 1, 8), []
    for length in range(1, 100):
        for layer in range(4):
            cache.update(states, states, layer)
        part = cache.lend(2, length)
        for _ in range(6):
            part.update(states, states, 0)
            part.update(states, states, 1)
        cache.take_back(part, length)
        returns.append(cache.can_return_to(length))
    assert all(returns) is keeps


def test_every_layers_output_is_given_where_it_is_asked_for() -> None:
    target, ids = target_of(attn_implementation="eager"), torch.randint(3, 96, (1, 9))
    settings = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
    plain, ours = texts(target, ids, max_new_tokens=9, **settings)
    for name in ("hidden_states", "attentions"):
        for one, other in zip(getattr(plain, name), getattr(ours, name), strict=True):
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_the_target_is_left_as_it_was() -> None:
    target = target_of()
    before = {name: dict(module.__dict__) for name, module in target.named_modules()}
    texts(target, torch.randint(3, 96, (2, 9)))
    after = {name: dict(module.__dict__) for name, module in target.named_modules()}
    assert before.keys() == after.keys()
    for name, attributes in before.items():
        new = set(after[name]) - set(attributes)
        assert new <= {"_last_speculation"}, (name, new)
        assert all(
            after[name][key] is value for key, value in attributes.items() if key[0] == "_" and value is not None
        )


def test_a_replaced_forward() -> None:
    """accelerate's hooks leave the class's forward within reach; anything else is refused, not run wrongly."""
    target, ids = target_of(), torch.randint(3, 96, (1, 9))
    for module in (target, target.model):
        module._old_forward = module.forward
        module.forward = types.MethodType(lambda self, *args, **kwargs: self._old_forward(*args, **kwargs), module)
    plain, text = texts(target, ids)
    assert text.tolist() == plain.tolist()
    del target.model._old_forward
    own = type(target.model).forward
    target.model.forward = lambda *args, **kwargs: own(target.model, *args, **kwargs)
    with pytest.raises(ValueError, match=r"LlamaModel.forward has been replaced .*another strategy"):
        texts(target, ids)


@pytest.mark.parametrize("reduced", [False, True])
def test_sampling_is_exact(reduced: bool) -> None:
    target = small_target()
    head = head_for(target, (1,), **({"draft_vocab_size": 5} if reduced else {}))
    if reduced:
        head.set_draft_vocabulary(torch.tensor([0, 2, 3, 5, 7]))
    tokens = sample(target, head, speculative="early_exit", **options_of("combined"))
    assert fit(tokens, exact_joint(target, PROMPT, CASES["combined"][1])) > PASSES
    assert 0.02 < last_speculation(target).acceptance_by_position[0] < 0.98


# -- what the user says -----------------------------------------------------------------------------------------------


def drafting_layers(target: Any, **settings: Any) -> int:
    """After how many layers a call left the target."""
    single = [0] * len(target.model.layers)
    handles = [
        layer.register_forward_hook(
            lambda module, args, output, i=i: single.__setitem__(i, single[i] + (output.shape[1] == 1))
        )
        for i, layer in enumerate(target.model.layers)
    ]
    texts(target, torch.randint(3, 96, (1, 9)), max_new_tokens=6, num_assistant_tokens=2, **settings)
    for handle in handles:
        handle.remove()
    return sum(count > 8 for count in single)  # the plain call feeds each layer 5 single tokens


def test_where_the_exit_is_said() -> None:
    target = target_of(num_hidden_layers=6)
    assert drafting_layers(target) == 2
    assert drafting_layers(target, assistant_early_exit=4) == 4
    named = SpeculativeConfig(strategy="early_exit", assistant_early_exit=3)
    assert drafting_layers(target, speculative=named) == 3
    assert drafting_layers(target, speculative=named, assistant_early_exit=5) == 5
    head = head_for(target, (1, 4))
    assert drafting_layers(target, assistant_model=head) == 1
    assert drafting_layers(target, assistant_model=head, assistant_early_exit=4) == 4
    with pytest.raises(ValueError, match=r"assistant_early_exit=3: this head has exits after \[1, 4\]"):
        drafting_layers(target, assistant_model=head, assistant_early_exit=3)
    for wrong, match in ((6, r"must be 1 to 5"), (0, r"integer of at least 1")):
        with pytest.raises(ValueError, match=f"assistant_early_exit={wrong}.*{match}"):
            drafting_layers(target, assistant_early_exit=wrong)
    target.generation_config.assistant_early_exit = 3
    settings = {"do_sample": False, "max_new_tokens": 6, "speculative": "early_exit"}
    with pytest.warns(UserWarning, match="after 3 layers"):
        drafter_module._warned.clear()
        target.generate(torch.tensor([[3, 4]]), **settings)
    several = target.generate(torch.tensor([[3, 4]]), **{**settings, "do_sample": True}, num_return_sequences=2)
    assert several.shape == (2, 8)  # which transformers refuses of a call with this field
    assert target.generation_config.assistant_early_exit == 3


def test_one_warning_without_a_head() -> None:
    drafter_module._warned.clear()
    target, ids = target_of(), torch.tensor([[3, 4, 5]])
    settings = {"do_sample": False, "max_new_tokens": 5, "speculative": "early_exit"}
    with pytest.warns(UserWarning, match=r"after 1 layers .*pass a trained EarlyExitHead"):
        target.generate(ids, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        target.generate(ids, **settings)
        target.generate(ids, assistant_model=head_for(target), do_sample=False, max_new_tokens=5)


def test_what_is_refused() -> None:
    target, ids = target_of(), torch.tensor([[3, 4, 5]])
    with pytest.raises(TypeError, match="takes an EarlyExitHead as assistant_model, or none, not LlamaForCausalLM"):
        target.generate(ids, assistant_model=make_target(), speculative="early_exit")
    target.config.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match=r"cannot be left early.*num_kv_shared_layers"):
        target.generate(ids, speculative="early_exit")


def test_nan_and_confidence() -> None:
    target, ids = target_of(), torch.randint(3, 96, (1, 9))
    head = head_for(target)
    plain, text = texts(target, ids, assistant_model=head, assistant_confidence_threshold=1.0)
    assert text.tolist() == plain.tolist()
    assert last_speculation(target).drafted == 0
    with torch.no_grad():
        head.layers[0].out_norm.weight.fill_(torch.nan)
    with pytest.warns(UserWarning, match="after 2 layers EarlyExitHead returns NaN"):
        text = target.generate(ids, assistant_model=head, do_sample=False, max_new_tokens=24)
    assert text.tolist() == plain.tolist()


# -- the head ---------------------------------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path: Path) -> None:
    target = target_of("gemma2")
    head = head_for(target, (1, 3), draft_vocab_size=40, adapter_size=12)
    head.set_draft_vocabulary(torch.arange(40) * 2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.uniform_(0.1, 1.0)
    head.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(head.state_dict())  # nothing of the target's
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, EarlyExitConfig)
    assert config.exit_layers == [1, 3] and config.target_layer_ids == [0, 2]
    states = torch.randn(2, 5, 32)
    for loaded in (EarlyExitHead.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert isinstance(loaded, EarlyExitHead)
        assert loaded.draft_token_ids().tolist() == list(range(0, 80, 2))
        for exit in (1, 3):
            torch.testing.assert_close(loaded.bind(target)(states, exit), head.bind(target)(states, exit))
    assert not torch.equal(head(states), head(states, 3))
    assert float(head(states).detach().abs().max()) <= 20.0  # Gemma 2's cap
    assert EarlyExitHead.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert copy.deepcopy(head)._borrowed is None
    plain, text = texts(target, torch.randint(3, 96, (2, 9)), assistant_model=head)
    assert text.tolist() == plain.tolist()


def test_files_that_are_not_the_heads(tmp_path: Path) -> None:
    head_for(target_of()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = tensors.pop("layers.0.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: layers\.0\.up_proj\.weight"):
        EarlyExitHead.from_pretrained(tmp_path)
    tensors["layers.0.up_proj.weight"] = gone * torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="NaN or infinity"):
        EarlyExitHead.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"exit_layers": [4]}, r"exit_layers=\[4\]: .*from 1 to 3.*e\.g\. \[1\]"),
        ({"exit_layers": [2, 1]}, "ascending"),
        ({"exit_layers": []}, r"exit_layers=\[\]"),
        ({"exit_layers": 2}, "must be a list"),
        ({"adapter_size": 0}, "adapter_size=0: it must be an integer from 1"),
        ({"draft_vocab_size": 97}, "draft_vocab_size=97: it must not be larger than vocab_size=96"),
        ({"hidden_act": "sillu"}, "hidden_act='sillu'"),
        ({"block_size": 3}, "'block_size' is not a field of EarlyExitConfig"),
        ({"speculative_strategy": "dspark"}, "early_exit"),
    ],
)
def test_configurations_that_cannot_be(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(Exception, match=match):
        EarlyExitConfig.for_target(target_of().config, **fields)


def test_a_head_of_another_target() -> None:
    target = target_of()
    for other, match in (
        (
            target_of(hidden_size=64),
            r"target_hidden_size=32, but LlamaForCausalLM's hidden size is 64.*EarlyExitConfig",
        ),
        (target_of(num_hidden_layers=6), r"num_target_layers=4, but the decoder layers of LlamaForCausalLM is 6"),
        (target_of(vocab_size=80), r"vocab_size=96, but LlamaForCausalLM has 80"),
    ):
        with pytest.raises(ValueError, match=match):
            other.generate(torch.tensor([[3, 4]]), assistant_model=head_for(target), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"call head\.bind"):
        head_for(target)(torch.zeros(1, 32))
    with pytest.raises(ValueError, match="without speculation"):
        make_target().generate(torch.tensor([[3, 4]]), assistant_model=head_for(target), max_new_tokens=3)


# -- training ---------------------------------------------------------------------------------------------------------


def test_the_objective_teaches_each_exit() -> None:
    from specdec_hf.training.early_exit import EarlyExitObjective, new_exit_head
    from specdec_hf.training.features import target_features
    from specdec_hf.training.losses import LossWeights
    from specdec_hf.training.store import Sequence

    target = make_target(spread=3.0)
    ids = torch.randint(3, 60, (6, 20))
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    sequences = [Sequence(row, keep.bool(), 0) for row, keep in zip(ids, mask, strict=True)]
    head = new_exit_head(target, {"exit_layers": [1, 3], "draft_vocab_size": 60}, sequences, 0.3)
    objective = EarlyExitObjective(head, target, LossWeights(ce=0.1, tv=1.0), num_anchors=8, chunk=16)
    taps, last = target_features(target, head.config.target_layer_ids, ids, torch.ones_like(ids, dtype=torch.bool))
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    objective.num_anchors = 99
    first = objective(ids, mask, taps, last).acceptance
    for _ in range(60):
        loss = objective(ids, mask, taps, last)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert first.shape == (2,)
    assert bool((loss.acceptance > first + 0.15).all())
    assert all(parameter.grad is None for parameter in target.parameters())
    # 1 - TV at exactly the answer tokens that an answer token follows, against the definition
    head.eval()
    with torch.no_grad():
        wide = torch.full((*ids[:, 5:-1].shape, 96), float("-inf"))
        wide[..., head.draft_token_ids()] = head(taps[:, 5:-1, :32], 1)
        target_probs = target.lm_head(last[:, 5:-1]).softmax(-1)
        expected = 1 - 0.5 * (wide.softmax(-1) - target_probs).abs().sum(-1).mean()
        assert float(objective(ids, mask, taps, last).acceptance[0]) == pytest.approx(float(expected), abs=1e-5)
    with pytest.raises(ValueError, match="no anchor in a batch"):
        objective(ids, torch.zeros_like(ids), taps, last)


def test_a_recipe_trains_a_head(byte_tokenizer: Any, tmp_path: Path) -> None:
    from specdec_hf.training.recipe import run

    target = make_target(vocab_size=260, spread=1.5, max_position_embeddings=1024)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"turns": [f"question {n}"]}) for n in range(10)))
    recipe = f"""
target: {tmp_path / "target"}
strategy: early_exit
data:
  prompts: [p.jsonl]
  max_tokens: 120
  sampling: {{batch_size: 4, max_new_tokens: 20, max_prompt_tokens: 700}}
train:
  head: {{exit_layers: [1, 2], adapter_size: 16, draft_vocab_size: 100}}
  max_steps: 4
  save_steps: 2
  num_anchors: 8
  validation: 2
  feature_cache: features
"""
    (tmp_path / "r.yaml").write_text(recipe)
    figures = run(tmp_path / "r.yaml", tmp_path / "out")
    assert figures["answer_tokens"] >= 120
    head = EarlyExitHead.from_pretrained(tmp_path / "out" / "head").bind(target)
    assert float(head.layers[1].down_proj.weight.detach().abs().max()) > 0
    assert run(tmp_path / "r.yaml", tmp_path / "out")["answer_tokens"] == figures["answer_tokens"]
    (tmp_path / "bad.yaml").write_text(recipe.replace("early_exit", "early_exits"))
    with pytest.raises(ValueError, match="strategy='early_exits' cannot be trained; choose from dspark, early_exit"):
        run(tmp_path / "bad.yaml", tmp_path / "no")


def test_lent_layers_share_memory_and_come_back() -> None:
    cache = SpeculativeCache(make_target().generate(
        torch.randint(3, 96, (2, 5)), max_new_tokens=1, return_dict_in_generate=True, eos_token_id=None
    )[CACHE_KEY], 64)  # fmt: skip
    part = cache.lend(2, 5)
    states = torch.ones(2, 2, 1, 8)
    for layer in range(2):
        part.update(states, states, layer)
    assert [layer.get_seq_length() for layer in cache.layers] == [6, 6, 5, 5]
    cache.take_back(part, 5)
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5, 5, 5]
    assert all(layer.rows is cache.rows for layer in cache.buffered)
    assert bool((cache.buffered[1]._keys[:, :, 5] == 1).all())  # what was read ahead stays written
