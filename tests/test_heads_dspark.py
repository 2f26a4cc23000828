"""The DSpark head against DeepSpec's numbers, against naive versions of itself, and against hostile input."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from specdec_hf.heads import DraftContext, DSparkConfig, DSparkDraftModel

GOLDEN = Path(__file__).parent / "golden" / "deepspec"
KINDS = ("vanilla", "gated", "rnn")


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


@pytest.fixture(scope="module")
def golden_heads() -> dict[str, DSparkDraftModel]:
    return {kind: DSparkDraftModel.from_pretrained(GOLDEN / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def golden_target() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "target")


def part(expected: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name[len(prefix) + 1 :]: value for name, value in expected.items() if name.startswith(prefix + ".")}


def small_config(**overrides: object) -> DSparkConfig:
    fields = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 4,
        "mask_token_id": 49,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
        "markov_rank": 6,
    }
    return DSparkConfig(**{**fields, **overrides})


def small_head(seed: int = 0, **overrides: object) -> DSparkDraftModel:
    torch.manual_seed(seed)
    head = DSparkDraftModel(small_config(**overrides)).eval()
    with torch.no_grad():
        for parameter in head.parameters():  # larger than the usual start, so that a mistake shows
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return head


def small_target(**overrides: object) -> LlamaForCausalLM:
    torch.manual_seed(5)
    fields = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**fields, **overrides})).eval()


def filled(head: DSparkDraftModel, taps: torch.Tensor, **options: object) -> DraftContext:
    context = head.new_context(taps.shape[0], **options)
    head.extend_context(context, taps, torch.arange(taps.shape[1]).expand(taps.shape[0], -1))
    return context


@torch.no_grad()
def greedy(
    head: DSparkDraftModel, anchor: torch.Tensor, hidden: torch.Tensor, base: torch.Tensor, **options: int
) -> dict[str, torch.Tensor]:
    state, previous, logits, confidence, tokens = None, anchor, [], [], []
    for slot in range(hidden.shape[1]):
        row, sure, state = head.markov_step(state, previous, hidden[:, slot], base[:, slot], **options)
        previous = head.draft_to_target(row.argmax(-1))
        logits.append(row)
        confidence.append(sure)
        tokens.append(previous)
    out = {"logits": torch.stack(logits, 1), "tokens": torch.stack(tokens, 1)}
    return out if confidence[0] is None else {**out, "confidence_logits": torch.stack(confidence, 1)}


def close(left: torch.Tensor, right: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


# -- golden ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", range(4))
def test_round_equals_deepspec(kind, prompt, expected, golden_heads, golden_target):
    want, head = part(expected, f"{kind}.round0.{prompt}"), golden_heads[kind]
    length = want["taps"].shape[1]
    with torch.no_grad():
        states = golden_target(expected[f"prompt.{prompt}"][None], output_hidden_states=True).hidden_states
    own_taps = [states[layer + 1] for layer in head.config.target_layer_ids]
    close(torch.cat(own_taps, -1), want["taps"])
    for taps in (want["taps"], own_taps):
        context = head.new_context(1, capacity=8)
        head.extend_context(context, taps, torch.arange(length)[None])
        hidden, base = head.draft_block(context, want["anchor"], torch.tensor([length]))
        got = greedy(head, want["anchor"], hidden, base)
        close(hidden, want["block_hidden"])
        close(base, want["base_logits"])
        close(got["logits"], want["logits"])
        close(got["confidence_logits"], want["confidence_logits"])
        assert torch.equal(got["tokens"], want["tokens"])


@pytest.mark.parametrize("kind", KINDS)
def test_training_forward_equals_deepspec(kind, expected, golden_heads):
    want, head = part(expected, f"{kind}.train"), golden_heads[kind]
    with torch.no_grad():
        got = head(want["input_ids"], want["target_hidden_states"], want["anchors"])
    valid = want["eval_mask"].bool()
    assert valid.sum() > 30
    close(got.logits[valid], want["draft_logits"][valid])
    close(got.confidence_logits[valid], want["confidence_pred"][valid])


def test_wrong_tap_order_is_visible(expected, golden_heads):
    want, head = part(expected, "vanilla.round0.0"), golden_heads["vanilla"]
    taps = want["taps"].chunk(3, dim=-1)
    context = filled(head, torch.cat((taps[1], taps[0], taps[2]), -1))
    hidden, _ = head.draft_block(context, want["anchor"], torch.tensor([want["taps"].shape[1]]))
    assert (hidden - want["block_hidden"]).abs().max() > 0.1


# -- context ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
def test_incremental_context_equals_whole(window):
    head = small_head(sliding_window=window)
    taps = torch.randn(1, 23, 64)
    whole = filled(head, taps)
    parts = head.new_context(1, capacity=2)
    for start, end in ((0, 9), (9, 10), (10, 12), (12, 23)):
        head.extend_context(parts, taps[:, start:end], torch.arange(start, end)[None])
        head.draft_block(parts, torch.tensor([3]), torch.tensor([end]))  # its scratch must leave no trace
    assert parts.max_length == 23 and parts.lengths.tolist() == [23] and parts.uniform
    for one, two in zip(
        head.draft_block(whole, torch.tensor([7]), torch.tensor([23])),
        head.draft_block(parts, torch.tensor([7]), torch.tensor([23])),
        strict=True,
    ):
        close(one, two)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("exact", [True, False])
def test_ragged_rows_equal_single_rows(window, exact):
    head = small_head(sliding_window=window)
    lengths, second = [5, 11, 1], [2, 0, 4]
    taps = [torch.randn(1, first + more, 64) for first, more in zip(lengths, second, strict=True)]
    padded, later = torch.full((3, 11, 64), float("nan")), torch.full((3, 4, 64), float("nan"))
    places = torch.zeros(3, 4, dtype=torch.long)
    for row, (first, more) in enumerate(zip(lengths, second, strict=True)):
        padded[row, :first], later[row, :more] = taps[row][0, :first], taps[row][0, first:]
        places[row] = first + torch.arange(4)
    context = head.new_context(3, capacity=1)
    head.extend_context(
        context, padded, torch.arange(11).expand(3, -1), torch.tensor(lengths), max_length=11 if exact else None
    )
    head.extend_context(context, later, places, torch.tensor(second), max_length=11 if exact else None)
    total = torch.tensor([7, 11, 5])
    assert torch.equal(context.lengths, total) and context.max_length == (11 if exact else 15)
    anchors = torch.tensor([4, 8, 15])
    hidden, base = head.draft_block(context, anchors, total)
    for row in range(3):
        alone = filled(head, taps[row])
        want = head.draft_block(alone, anchors[row : row + 1], total[row : row + 1])
        close(hidden[row : row + 1], want[0])
        close(base[row : row + 1], want[1])
    context.select_rows(torch.tensor([2, 0]))
    close(head.draft_block(context, anchors[[2, 0]], total[[2, 0]])[0], hidden[[2, 0]])
    context.select_rows(torch.tensor([0]), max_length=5)
    assert context.uniform
    close(head.draft_block(context, anchors[[2]], total[[2]])[0], hidden[[2]])


def test_all_tokens_of_ragged_rows_and_rollback():
    head = small_head()
    taps, more = torch.randn(2, 6, 64), torch.randn(2, 2, 64)
    context = head.new_context(2)
    head.extend_context(context, taps, torch.arange(6).expand(2, -1), torch.tensor([6, 3]), max_length=6)
    head.extend_context(context, more, torch.tensor([[6, 7], [3, 4]]))
    assert context.lengths.tolist() == [8, 5] and context.max_length == 8
    ids, places = torch.tensor([1, 2]), torch.tensor([8, 5])
    hidden, _ = head.draft_block(context, ids, places)
    for row, first in ((0, 6), (1, 3)):
        alone = filled(head, torch.cat((taps[row : row + 1, :first], more[row : row + 1]), 1))
        close(hidden[row : row + 1], head.draft_block(alone, ids[row : row + 1], places[row : row + 1])[0])
    context.rollback(torch.tensor([6, 3]), max_length=6)
    again = head.draft_block(context, ids, torch.tensor([6, 3]))[0]
    context.rollback(6)
    close(again, head.draft_block(context, ids, torch.tensor([6, 3]))[0])
    with pytest.raises(ValueError, match="length=9"):
        context.rollback(9)
    context.reset()
    assert context.max_length == 0 and context.uniform and context.lengths.tolist() == [0, 0]
    assert head.draft_block(context, ids, torch.tensor([0, 0]))[0].isfinite().all()


@pytest.mark.parametrize("layer_types", [None, ["full_attention", "sliding_attention"]])
def test_sliding_window_equals_masked_reference(layer_types):
    """The window must act as if older tokens were masked: as block_forward does with its mask."""
    head = small_head(sliding_window=4, layer_types=layer_types)
    features, ids = torch.randn(1, 16, 64), torch.randint(0, 49, (1, 16))
    for anchor in (2, 9, 15):
        context = filled(head, features[:, :anchor])
        got = head.draft_block(context, ids[:, anchor], torch.tensor([anchor]))[0]
        close(got, head.block_forward(features, torch.tensor([[anchor]]), ids)[:, 0])
    context = filled(head, features)
    want = head.draft_block(context, ids[:, 0], torch.tensor([16]))[0]
    older = features.clone()
    older[:, :12] += 1.0  # beyond the window of 4
    got = head.draft_block(filled(head, older), ids[:, 0], torch.tensor([16]))[0]
    assert torch.allclose(want, got) == (layer_types is None)


def test_fewer_slots_are_the_first_ones():
    for overrides in ({}, {"sample_from_anchor": False}, {"num_hidden_layers": 1}):
        head = small_head(**overrides)
        context = filled(head, torch.randn(2, 5, 64))
        ids, places = torch.tensor([1, 2]), torch.tensor([5, 5])
        hidden, base = head.draft_block(context, ids, places)
        assert hidden.shape[1] == head.max_draft_tokens and base.dtype == torch.float32
        for wanted in range(1, head.max_draft_tokens + 1):
            some = head.draft_block(context, ids, places, num_tokens=wanted)
            close(some[0], hidden[:, :wanted])
            close(some[1], base[:, :wanted])
        with pytest.raises(ValueError, match=f"1 to {head.max_draft_tokens}"):
            head.draft_block(context, ids, places, num_tokens=head.max_draft_tokens + 1)
        with pytest.raises(ValueError, match="2 rows"):
            head.draft_block(context, torch.tensor([1]), places)


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_never_reads_a_value_on_the_host(kind):
    """Fake tensors have no values: any .item(), bool(tensor) or nonzero() would raise."""
    head = small_head(markov_head_type=kind, draft_vocab_size=20, sliding_window=5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        context = head.new_context(2, capacity=3)
        taps, places = torch.zeros(2, 4, 64), torch.arange(4).expand(2, -1)
        head.extend_context(context, taps, places)
        for counts, longest in (
            (None, None),
            (torch.ones(2, dtype=torch.long), None),
            (torch.ones(2, dtype=torch.long), 6),
        ):
            head.extend_context(context, taps, places, counts, longest)
            hidden, base = head.draft_block(context, torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long))
            logits, sure, _ = head.markov_step(
                None, torch.zeros(2, dtype=torch.long), hidden[:, 0], base[:, 0], top_k=3
            )
            head.to_target_logits(logits)
            head.confidence_probs(sure[:, None])
        context.select_rows(torch.zeros(1, dtype=torch.long), max_length=6)
        with pytest.raises(DataDependentOutputException):
            int(context.lengths[0])


def test_positions_are_the_callers():
    """A left-padded row counts from its first real token; only relative distances matter to the result."""
    head = small_head()
    taps = torch.randn(1, 6, 64)
    context, shifted = filled(head, taps), head.new_context(1)
    head.extend_context(shifted, taps, torch.arange(6)[None] + 100)
    want = head.draft_block(context, torch.tensor([1]), torch.tensor([6]))[0]
    close(head.draft_block(shifted, torch.tensor([1]), torch.tensor([106]))[0], want, atol=1e-4)
    assert (head.draft_block(shifted, torch.tensor([1]), torch.tensor([120]))[0] - want).abs().max() > 1e-3


# -- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_steps_equal_teacher_forcing(kind):
    head = small_head(markov_head_type=kind)
    hidden, base = head.draft_block(filled(head, torch.randn(3, 4, 64)), torch.tensor([1, 2, 3]), torch.full((3,), 4))
    got = greedy(head, torch.tensor([1, 2, 3]), hidden, base)
    previous = torch.cat((torch.tensor([[1], [2], [3]]), got["tokens"][:, :-1]), 1)
    logits, confidence = head.markov_logits(previous[:, None], hidden[:, None], base[:, None])
    close(logits[:, 0], got["logits"])
    close(confidence[:, 0], got["confidence_logits"])
    assert (kind == "none") == torch.equal(got["logits"], base)


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_truncates_exactly(kind):
    head = small_head(markov_head_type=kind, draft_top_k=7)
    anchor = torch.tensor([1, 2])
    hidden, base = head.draft_block(filled(head, torch.randn(2, 4, 64)), anchor, torch.tensor([4, 4]))
    full, _, _ = head.markov_step(None, anchor, hidden[:, 0], base[:, 0], top_k=0)
    cut, _, _ = head.markov_step(None, anchor, hidden[:, 0], base[:, 0])
    kept = base[:, 0].topk(7).indices
    assert torch.equal(cut.isfinite().sum(-1), torch.tensor([7, 7]))
    close(cut.gather(1, kept), full.gather(1, kept))
    whole = [greedy(head, anchor, hidden, base, top_k=count)["logits"] for count in (50, 0)]
    assert torch.equal(*whole)


def test_confidence_variants_and_calibration():
    plain = small_head(confidence_head_with_markov=False)
    assert plain.confidence_head.proj.weight.shape == (1, 32)
    hidden, base = torch.randn(2, 32), torch.randn(2, 50)
    one = plain.markov_step(None, torch.tensor([1, 2]), hidden, base)[1]
    close(one, plain.markov_step(None, torch.tensor([9, 8]), hidden, base)[1])
    assert small_head(enable_confidence_head=False).markov_step(None, torch.tensor([1, 2]), hidden, base)[1] is None
    calibrated = small_head(confidence_temperatures=[1.0, 2.0, 4.0, 0.5])
    logits = torch.tensor([[2.0, 2.0, 2.0]])
    close(calibrated.confidence_probs(logits), torch.sigmoid(torch.tensor([[2.0, 1.0, 0.5]])))
    close(plain.confidence_probs(logits), torch.sigmoid(logits))


def test_reduced_vocabulary(tmp_path):
    head = small_head(draft_vocab_size=12)
    ids = torch.tensor([0, 3, 4, 7, 11, 20, 21, 30, 33, 40, 48, 49])
    head.set_draft_vocabulary(ids.flip(0))
    assert torch.equal(head.draft_token_ids(), ids)
    assert head.draft_to_target(torch.tensor([[2, 11]])).tolist() == [[4, 49]]
    logits = torch.randn(2, 3, 12)
    for width in (50, 64):
        wide = head.to_target_logits(logits, width)
        assert wide.shape == (2, 3, width) and torch.equal(wide[..., ids], logits)
        assert wide.isfinite().sum() == logits.numel()
    head.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.d2t.dtype == torch.int64 and torch.equal(again.draft_token_ids(), ids)
    anchor = torch.tensor([1])
    hidden, base = head.draft_block(filled(head, torch.randn(1, 4, 64)), anchor, torch.tensor([4]))
    tokens = greedy(head, anchor, hidden, base)["tokens"]
    assert base.shape == (1, 4, 12) and torch.isin(tokens, ids).all()
    with pytest.raises(ValueError, match="12 ascending"):
        head.set_draft_vocabulary(torch.arange(40, 52))
    with pytest.raises(ValueError, match="draft_vocab_size"):
        small_head().set_draft_vocabulary(ids)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["d2t"] = ids + 40  # absolute ids, the usual mistake
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="offsets"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_full_vocabulary_pads_to_a_wider_target():
    head = small_head()
    logits = torch.randn(2, 50)
    assert head.to_target_logits(logits) is logits
    assert torch.equal(head.to_target_logits(logits, 64)[:, :50], logits)
    assert head.to_target_logits(logits, 64)[:, 50:].isneginf().all()


def test_mask_slots_only():
    """sample_from_anchor false: the same backbone, but the anchor slot's prediction is dropped."""
    head, other = small_head(), small_head(sample_from_anchor=False)
    other.load_state_dict(head.state_dict())
    context = filled(head, torch.randn(1, 5, 64))
    full = head.draft_block(context, torch.tensor([1]), torch.tensor([5]))[0]
    assert other.max_draft_tokens == 3
    close(other.draft_block(context, torch.tensor([1]), torch.tensor([5]))[0], full[:, 1:])


# -- training --------------------------------------------------------------------------------------------------------


def test_block_forward_equals_decoding_and_trains():
    head = small_head(markov_head_type="rnn", mask_token_id=None)
    features, ids = torch.randn(2, 12, 64), torch.randint(0, 50, (2, 12))
    anchors = torch.tensor([[0, 3, 11], [7, 7, 2]])
    with torch.no_grad():
        hidden = head.block_forward(features, anchors, ids)
        for row in range(2):
            for block, anchor in enumerate(anchors[row].tolist()):
                context = head.new_context(1)
                if anchor:
                    head.extend_context(context, features[row : row + 1, :anchor], torch.arange(anchor)[None])
                alone = head.draft_block(context, ids[row : row + 1, anchor], torch.tensor([anchor]))[0]
                close(hidden[row : row + 1, block], alone)
    out = head.train()(ids, features, torch.tensor([[-1, 3, 99], [7, 0, 2]]))  # dummies among them
    assert out.logits.shape == (2, 3, 4, 50) and out.logits.isfinite().all()
    (out.logits.logsumexp(-1).mean() + out.confidence_logits.square().mean()).backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_block_forward_hides_masked_context_and_later_tokens():
    head = small_head()
    features, ids = torch.randn(1, 10, 64), torch.randint(0, 49, (1, 10))
    anchors, mask = torch.tensor([[6]]), torch.ones(1, 10, dtype=torch.bool)
    mask[:, :2] = False
    want = head.block_forward(features, anchors, ids, context_mask=mask)
    changed = features.clone()
    changed[:, :2], changed[:, 6:] = 9.0, -9.0
    close(head.block_forward(changed, anchors, ids, context_mask=mask), want)
    empty = head.block_forward(features, anchors, ids, context_mask=torch.zeros(1, 10, dtype=torch.bool))
    assert empty.isfinite().all()


# -- joining a target ------------------------------------------------------------------------------------------------


def test_borrowed_parts_are_used_but_not_owned(tmp_path):
    target = small_target()
    config = DSparkConfig.for_target(target.config, block_size=4, markov_rank=4, target_layer_ids=[0, 2])
    assert not config.has_embed_tokens and not config.has_lm_head
    head = DSparkDraftModel(config).eval()
    context = filled(head, torch.randn(1, 3, 64))
    with pytest.raises(ValueError, match="bind"):
        head.draft_block(context, torch.tensor([1]), torch.tensor([3]))
    names = set(head.state_dict())
    assert head.bind(target) is head and head.bind(target) is head
    hidden, base = head.draft_block(context, torch.tensor([1]), torch.tensor([3]))
    close(base, target.lm_head(hidden))
    close(head._embed(torch.tensor([4])), target.model.embed_tokens(torch.tensor([4])))
    assert set(head.state_dict()) == names and not any("embed_tokens" in n or "lm_head" in n for n in names)
    assert all(parameter is not target.lm_head.weight for parameter in head.parameters())
    head.save_pretrained(tmp_path)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "model.safetensors"))
    again = DSparkDraftModel.from_pretrained(tmp_path).bind(target)
    close(again.draft_block(context, torch.tensor([1]), torch.tensor([3]))[1], base)
    for clone in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert clone._borrowed is None
    del target
    gc.collect()
    with pytest.raises(ValueError, match="deleted"):
        head.draft_block(context, torch.tensor([1]), torch.tensor([3]))


def test_reduced_borrowed_lm_head_follows_the_target():
    target = small_target()
    config = DSparkConfig.for_target(target.config, block_size=4, draft_vocab_size=10, target_layer_ids=[0, 2])
    head = DSparkDraftModel(config).eval().bind(target)
    head.set_draft_vocabulary(torch.arange(0, 50, 5))
    hidden = torch.randn(2, 32)
    close(head.project_logits(hidden), target.lm_head(hidden)[:, ::5])
    kept = head._borrowed._rows[1]
    head.project_logits(hidden)
    assert head._borrowed._rows[1] is kept
    with torch.no_grad():
        target.lm_head.weight.mul_(2.0)
    close(head.project_logits(hidden), target.lm_head(hidden)[:, ::5])
    head.set_draft_vocabulary(torch.arange(1, 50, 5))
    close(head.project_logits(hidden), target.lm_head(hidden)[:, 1::5])

    class Quantised(torch.nn.Module):  # a weight that is not the matrix: must be called
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner, self.weight = inner, torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden)

    target.set_output_embeddings(Quantised(target.lm_head))
    close(head.project_logits(hidden), target.lm_head(hidden)[:, 1::5])


def test_adapter_on_target_stays_in_effect():
    peft = pytest.importorskip("peft")
    target = peft.get_peft_model(small_target(), peft.LoraConfig(target_modules=["lm_head", "embed_tokens"], r=2))
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "lora" in name:
                parameter.normal_()
    for reduced in (None, 10):
        config = DSparkConfig.for_target(target.config, draft_vocab_size=reduced, target_layer_ids=[0, 2])
        head = DSparkDraftModel(config).eval().bind(target)
        hidden = torch.randn(1, 32)
        want = target.get_output_embeddings()(hidden)[:, : reduced or 50]
        close(head.project_logits(hidden), want)
        close(head._embed(torch.tensor([3])), target.get_input_embeddings()(torch.tensor([3])))


def test_target_dtype_may_differ():
    target = small_target().to(torch.bfloat16)
    for reduced in (None, 10):
        config = DSparkConfig.for_target(target.config, draft_vocab_size=reduced, block_size=4, target_layer_ids=[0, 2])
        head = DSparkDraftModel(config).eval().bind(target)
        context = filled(head, torch.randn(1, 3, 64, dtype=torch.bfloat16))
        hidden, base = head.draft_block(context, torch.tensor([1]), torch.tensor([3]))
        assert hidden.dtype == torch.float32 and base.dtype == torch.float32 and base.shape[-1] == (reduced or 50)


def test_bf16_head_is_close_to_float32(expected, golden_heads):
    want, head = part(expected, "vanilla.round0.0"), copy.deepcopy(golden_heads["vanilla"]).to(torch.bfloat16)
    assert torch.equal(head.rotary.inv_freq, golden_heads["vanilla"].rotary.inv_freq)  # rounding it would be wrong
    length = want["taps"].shape[1]
    hidden, base = head.draft_block(filled(head, want["taps"]), want["anchor"], torch.tensor([length]))
    got = greedy(head, want["anchor"], hidden, base)
    assert hidden.dtype == torch.bfloat16 and got["logits"].dtype == torch.float32
    assert (got["logits"] - want["logits"]).abs().max() < 0.3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 40}, "vocab_size=50"),
        ({"vocab_size": 5000}, "vocab_size=50"),
        ({"vocab_size": 64, "eos_token_id": 9}, "eos_token_id"),
        ({"hidden_size": 48, "head_dim": 8}, "target_hidden_size=32"),
        ({"num_hidden_layers": 5}, "num_target_layers=4"),
    ],
)
def test_wrong_target_is_refused(overrides, message):
    head = small_head(eos_token_id=2)
    with pytest.raises(ValueError, match=message):
        head.bind(small_target(**overrides))


def test_padded_target_vocabulary_is_accepted():
    head = small_head(eos_token_id=2).bind(small_target(vocab_size=64))
    assert head._borrowed is not None
    with pytest.raises(TypeError, match="transformers model"):
        head.bind(torch.nn.Linear(2, 2))
    t5 = AutoConfig.for_model("t5", d_model=32, num_layers=4, vocab_size=50, d_ff=8, num_heads=2, d_kv=8)
    with pytest.raises(ValueError, match="encoder-decoder"):
        head.bind(AutoModelForSeq2SeqLM.from_config(t5))
    with pytest.raises(ValueError, match="taps go up to 2"):
        small_head(num_target_layers=None, target_layer_ids=[3]).bind(small_target())
    borrowed = DSparkDraftModel(small_config(has_embed_tokens=False, has_lm_head=False))
    target = small_target(vocab_size=64)
    assert borrowed.bind(target).project_logits(torch.randn(1, 32)).shape == (1, 50)


FAMILIES = {
    "llama": {"num_hidden_layers": 6},
    "qwen3": {"num_hidden_layers": 6, "head_dim": 16},
    "mistral": {"num_hidden_layers": 6},
    "gemma2": {"num_hidden_layers": 6, "head_dim": 16},
    "gemma3_text": {"num_hidden_layers": 6, "head_dim": 16},
    "phi3": {"num_hidden_layers": 6, "pad_token_id": 0},
    "gpt2": {"n_layer": 6},
    "qwen3_moe": {
        "num_hidden_layers": 6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_for_target_fits_every_family(family):
    shape = {"n_embd": 64, "n_head": 4} if family == "gpt2" else {"hidden_size": 64, "num_attention_heads": 4}
    if family not in ("gpt2",):
        shape |= {"intermediate_size": 96, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, vocab_size=60, **shape, **FAMILIES[family])
    config.eos_token_id, config.bos_token_id, config.pad_token_id = 1, 2, 0
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    made = DSparkConfig.for_target(config, block_size=3, markov_rank=4)
    assert max(made.target_layer_ids) < 5 and made.num_target_layers == 6 and made.eos_token_id == 1
    head = DSparkDraftModel(made).eval().bind(target)
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    context = head.new_context(2)
    taps = [states[layer + 1] for layer in made.target_layer_ids]
    head.extend_context(context, taps, torch.arange(7).expand(2, -1))
    hidden, base = head.draft_block(context, ids[:, 0], torch.tensor([7, 7]))
    assert hidden.shape == (2, 3, 64) and base.shape == (2, 3, 60) and base.isfinite().all()


def test_for_target_overrides():
    config = LlamaConfig(hidden_size=64, num_hidden_layers=30, num_attention_heads=4)
    narrow = DSparkConfig.for_target(config, hidden_size=48, num_hidden_layers=3)
    assert narrow.has_embed_tokens and narrow.has_lm_head and narrow.target_hidden_size == 64
    assert DSparkDraftModel(narrow).fc.weight.shape == (48, 64 * 5)
    with pytest.raises(ValueError, match="did you mean 'block_size'"):
        DSparkConfig.for_target(config, blok_size=3)
    with pytest.raises(ValueError, match="encoder-decoder"):
        DSparkConfig.for_target(AutoConfig.for_model("t5"))
    nested = AutoConfig.for_model("gemma3")
    assert DSparkConfig.for_target(nested).hidden_size == nested.text_config.hidden_size
    scaled = LlamaConfig(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    )
    made = DSparkConfig.for_target(scaled, hidden_size=64)
    assert made.rope_parameters["rope_type"] == "llama3"
    assert DSparkDraftModel(made).rotary.inv_freq.isfinite().all()


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_bit_for_bit(kind, dtype, tmp_path):
    head = small_head(markov_head_type=kind, mask_token_id=None, qk_norm=False, attention_bias=True).to(dtype)
    head.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "dspark" and saved["architectures"] == ["DSparkDraftModel"]
    for again in (
        DSparkDraftModel.from_pretrained(tmp_path, dtype="auto"),
        AutoModel.from_pretrained(tmp_path, dtype=dtype),
    ):
        assert type(again) is DSparkDraftModel and again.dtype == dtype and not again.training
        assert again.config.to_diff_dict().keys() == head.config.to_diff_dict().keys()
        assert list(again.state_dict()) == list(head.state_dict())
        for name, tensor in head.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[name]), name
        assert torch.equal(again.rotary.inv_freq.float(), DSparkDraftModel(head.config).rotary.inv_freq)


def test_rotary_buffers_after_load(golden_heads):
    want = 1.0 / (10_000.0 ** (torch.arange(0, 16, 2) / 16))
    for head in golden_heads.values():
        close(head.rotary.inv_freq, want)
        assert "rotary.inv_freq" not in head.state_dict()


def test_deepspec_is_saved_in_our_layout(golden_heads, tmp_path, expected):
    golden_heads["rnn"].save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert isinstance(again, DSparkDraftModel) and AutoConfig.from_pretrained(tmp_path).target_layer_ids == [0, 2, 4]
    want = part(expected, "rnn.round0.1")
    length = want["taps"].shape[1]
    hidden, _ = again.draft_block(filled(again, want["taps"]), want["anchor"], torch.tensor([length]))
    close(hidden, want["block_hidden"])


def test_deepspec_config_is_told_by_fields_not_by_names(tmp_path):
    fields = json.loads((GOLDEN / "vanilla" / "config.json").read_text())
    fields["architectures"] = ["SomethingElse"]
    shutil.copy(GOLDEN / "vanilla" / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert DSparkDraftModel.from_pretrained(tmp_path).config.qk_norm
    for change, message in (
        ({"rope_parameters": None}, "rope_theta"),
        ({"target_layer_ids": [0, 2, 5]}, "last layer"),
        ({"markov_head_type": "gated"}, "markov_head.gate_proj"),
        ({"model_type": "llama"}, "qk_norm"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
        with pytest.raises(ValueError, match=message):
            DSparkDraftModel.from_pretrained(tmp_path)


def test_loading_options(tmp_path, golden_heads):
    golden_heads["vanilla"].save_pretrained(tmp_path / "repo" / "inner", max_shard_size="100KB")
    assert (tmp_path / "repo" / "inner" / "model.safetensors.index.json").exists()
    head, info = DSparkDraftModel.from_pretrained(
        tmp_path / "repo",
        subfolder="inner",
        dtype=torch.float16,
        device_map="cpu",
        draft_top_k=5,
        output_loading_info=True,
    )
    assert head.dtype == torch.float16 and head.config.draft_top_k == 5 and not info["missing_keys"]
    assert torch.equal(head.rotary.inv_freq, golden_heads["vanilla"].rotary.inv_freq)
    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "cache" / "models--someone--head"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "v1").write_text(revision)
    shutil.copytree(GOLDEN / "gated", repo / "snapshots" / revision)
    options = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    for name in ("v1", revision):
        hub = DSparkDraftModel.from_pretrained("someone/head", revision=name, **options)
        assert hub.config.markov_head_type == "gated"
    with pytest.raises(OSError):
        DSparkDraftModel.from_pretrained("someone/absent", **options)


@pytest.mark.parametrize("absent", ["embed_tokens", "lm_head"])
def test_absent_embeddings_are_borrowed(absent, tmp_path, golden_target, caplog, expected):
    shutil.copytree(GOLDEN / "vanilla", tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{absent}.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    head = DSparkDraftModel.from_pretrained(tmp_path / "head")
    assert f"no {absent}" in caplog.text and getattr(head, absent) is None
    head.bind(golden_target)  # DeepSpec copies both from the target, so the numbers stay
    want = part(expected, "vanilla.round0.2")
    length = want["taps"].shape[1]
    close(head.draft_block(filled(head, want["taps"]), want["anchor"], torch.tensor([length]))[1], want["base_logits"])


def damaged(tmp_path: Path, change) -> Path:
    shutil.copytree(GOLDEN / "vanilla", tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return tmp_path / "head"


def test_wrong_tensors_are_refused(tmp_path, caplog):
    def edit(tensors):
        del tensors["fc.weight"]
        tensors["layers.0.pre_feedforward_layernorm.weight"] = torch.ones(64)
        tensors["norm.weight"] = torch.ones(63)

    message = r"missing: fc\.weight; unexpected: .*pre_feedforward.*wrong shape: norm"
    with pytest.raises(ValueError, match=message) as error:
        DSparkDraftModel.from_pretrained(damaged(tmp_path, edit))
    assert "config.json" in str(error.value)
    prefixed = damaged(tmp_path / "p", lambda t: [t.update({f"model.{n}": t.pop(n)}) for n in list(t)])
    with pytest.raises(ValueError, match="prefix 'model'"):
        DSparkDraftModel.from_pretrained(prefixed)
    broken = damaged(tmp_path / "n", lambda t: t["fc.weight"].view(-1)[5:6].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"fc\.weight hold NaN"):
        DSparkDraftModel.from_pretrained(broken)
    DSparkDraftModel.from_pretrained(damaged(tmp_path / "c", lambda t: t["fc.weight"].fill_(0.0)))
    assert "fc.weight are the same" in caplog.text


def test_damaged_files_are_named(tmp_path):
    folder = tmp_path / "head"
    shutil.copytree(GOLDEN / "vanilla", folder)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for content, advice in (
        (whole[: len(whole) // 2], "truncated"),
        (whole[:5], "truncated"),
        (b"", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (pickle.dumps({"a": 1}), "pickle"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=advice) as error:
            DSparkDraftModel.from_pretrained(folder)
        assert "model.safetensors" in str(error.value)
    path.unlink()
    with pytest.raises(OSError, match="safetensors"):
        DSparkDraftModel.from_pretrained(folder)
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        DSparkDraftModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="safetensors only"):
        DSparkDraftModel.from_pretrained(folder, use_safetensors=False)
    index = folder / "model.safetensors.index.json"
    for content, message in (("{", "index"), ('{"weight_map": {"a": "../../x.safetensors"}}', "shard")):
        index.write_text(content)
        with pytest.raises(ValueError, match=message):
            DSparkDraftModel.from_pretrained(folder)


def test_other_checkpoints_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not a DSpark head"):
        DSparkDraftModel.from_pretrained(GOLDEN / "target")
    for fields, message in (
        ({"speculators_model_type": "dspark"}, "convert"),
        ({"model_type": "qwen3", "block_size": 16, "dflash_config": {}}, "DFlash"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=message):
            DSparkDraftModel.from_pretrained(tmp_path)


# -- hostile configurations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {"markov_rank": -1},
        {"markov_rank": True},
        {"block_size": 0},
        {"block_size": "7"},
        {"block_size": 1, "sample_from_anchor": False},
        {"hidden_size": -5},
        {"hidden_size": 10**9},
        {"vocab_size": 10**12},
        {"hidden_size": None},
        {"num_hidden_layers": 2.0},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"hidden_act": "sillu"},
        {"rms_norm_eps": 0},
        {"rms_norm_eps": float("nan")},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
        {"rope_parameters": [1]},
        {"draft_vocab_size": 51},
        {"draft_vocab_size": 0},
        {"draft_top_k": 51},
        {"draft_top_k": 0},
        {"mask_token_id": 50},
        {"mask_token_id": -1},
        {"target_layer_ids": []},
        {"target_layer_ids": [0, 0]},
        {"target_layer_ids": [-2]},
        {"target_layer_ids": [3]},
        {"target_layer_ids": [9]},
        {"target_layer_ids": "0,2"},
        {"target_layer_ids": [0.5]},
        {"num_target_layers": 0},
        {"markov_head_type": "vanila"},
        {"markov_head_type": 3},
        {"sample_from_anchor": None},
        {"qk_norm": "yes"},
        {"sliding_window": 0},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"confidence_temperatures": [1.0]},
        {"confidence_temperatures": [1.0, 1.0, 1.0, -1.0]},
        {"has_lm_head": False, "target_hidden_size": 64},
        {"speculative_strategy": "medusa"},
        {"final_logit_softcapping": 0.0},
        {"num_hidden_layers": 256, "hidden_size": 65536, "intermediate_size": 1048576},
    ],
    ids=lambda overrides: ",".join(f"{name}={value}" for name, value in overrides.items())[:60],
)
def test_hostile_configuration_is_refused(overrides):
    with pytest.raises(ValueError) as error:
        small_config(**overrides)
    name = next(iter(overrides))
    known = ("billion", "rope_t", "block_size", "last layer", "has_lm_head", "factor", "sliding_window")
    assert name in str(error.value) or any(word in str(error.value) for word in known)


def test_configuration_details():
    assert DSparkConfig(num_target_layers=36).target_layer_ids == [1, 9, 17, 25, 33]
    assert DSparkConfig(num_target_layers=1).target_layer_ids == [-1]
    assert DSparkConfig(num_target_layers=2).target_layer_ids == [0]
    for overrides in ({"markov_rank": 0}, {"markov_head_type": "none"}):
        config = small_config(**overrides)
        assert config.markov_rank == 0 and config.markov_head_type == "none" and not config.confidence_head_with_markov
    assert small_config().parameter_count() == pytest.approx(sum(p.numel() for p in small_head().parameters()), rel=0.1)
    head = small_head(target_layer_ids=[-1, 1], embedding_scale=2.0, final_logit_softcapping=3.0)
    assert head.project_logits(torch.randn(4, 32) * 50).abs().max() <= 3.0
    close(head._embed(torch.tensor([1])), head.embed_tokens.weight[1:2] * 2.0)
    with pytest.raises(ValueError, match="batch_size=0"):
        head.new_context(0)
