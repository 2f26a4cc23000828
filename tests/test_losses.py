"""The training objective: against DeepSpec's numbers, and its gradients against a naive float64 version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec_hf.heads.dspark import DSparkConfig, DSparkDraftModel
from specdec_hf.training.losses import (
    LossWeights,
    chunked_losses,
    combine,
    draw_anchors,
    make_blocks,
    slot_losses,
    slot_weights,
)
from specdec_hf.training.objective import DSparkObjective

GOLDEN = Path(__file__).parent / "golden" / "deepspec"


@pytest.fixture(scope="module")
def golden() -> tuple[dict[str, torch.Tensor], dict]:
    return load_file(GOLDEN / "expected.safetensors"), json.loads((GOLDEN / "expected.json").read_text())


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32).eval()


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_equals_the_reference(golden, target, kind, chunk):
    tensors, expected = golden
    t = {
        name.removeprefix(f"{kind}.train."): value
        for name, value in tensors.items()
        if name.startswith(f"{kind}.train.")
    }
    head = DSparkDraftModel.from_pretrained(GOLDEN / kind, dtype=torch.float32)
    objective = DSparkObjective(head, target, chunk=chunk)
    anchors, keep = t["anchors"], t["keep"].bool()
    blocks = make_blocks(t["input_ids"], t["loss_mask"], anchors, keep, head.max_draft_tokens)
    valid = t["eval_mask"].bool()
    assert torch.equal(blocks.valid, valid)
    assert torch.equal(blocks.labels[valid], t["target_ids"][valid])
    hidden, latent, confidence = objective.features(blocks, t["input_ids"], t["target_hidden_states"])
    logits = objective.draft_logits(hidden, latent)
    torch.testing.assert_close(logits[valid], t["draft_logits"][valid], atol=1e-4, rtol=0)
    torch.testing.assert_close(confidence[valid], t["confidence_pred"][valid], atol=1e-4, rtol=0)
    losses = objective(
        t["input_ids"],
        t["loss_mask"],
        t["target_hidden_states"],
        t["target_last_hidden_states"],
        anchors=(anchors, keep),
    )
    reference = expected["heads"][kind]["losses"]
    for ours, name in (
        (losses.total.detach(), "total"),
        (losses.ce, "ce_loss"),
        (losses.tv, "l1_loss"),
        (losses.confidence, "confidence_loss"),
    ):
        assert float(ours) == pytest.approx(reference[name], abs=1e-4), name


def test_anchors_and_labels():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1, 0]])
    ids = torch.arange(16).view(2, 8)
    anchors, keep = draw_anchors(mask, 5)
    assert anchors.tolist() == [[1, 4, 5, 0, 0], [0, 0, 0, 0, 0]]
    assert keep.tolist() == [[True] * 3 + [False] * 2, [False] * 5]
    blocks = make_blocks(ids, mask, anchors, keep, 3)
    assert blocks.valid[0, :3].tolist() == [[True, False, False], [True, True, False], [True, False, False]]
    assert not blocks.valid[1].any() and not blocks.valid[0, 3:].any()
    assert blocks.labels[0, 1, :2].tolist() == [5, 6] and blocks.previous[0, 1, :2].tolist() == [4, 5]
    assert blocks.sources[0, 1, :2].tolist() == [4, 5]
    drawn = {tuple(draw_anchors(mask[:1], 1, torch.Generator().manual_seed(seed))[0][0].tolist()) for seed in range(30)}
    assert drawn == {(1,), (4,), (5,)}


def test_nothing_to_learn_from_is_an_error():
    with pytest.raises(ValueError, match="Check the loss mask"):
        draw_anchors(torch.tensor([[0, 1, 0, 1]]), 4)
    with pytest.raises(ValueError, match="decay=0"):
        LossWeights(decay=0)
    with pytest.raises(ValueError, match="chunk=0"):
        chunked_losses(
            (torch.zeros(1, 2),), torch.zeros(1, 2), None, torch.zeros(1).long(), None, lambda x: x, lambda x: x, 0
        )


def _naive(draft, target, labels, confidence):
    """Written out per slot in float64, with no shared code."""
    out = []
    for d, t, label, c in zip(draft, target, labels, confidence, strict=True):
        p_d, p_t = torch.exp(d) / torch.exp(d).sum(), torch.exp(t) / torch.exp(t).sum()
        distance = (p_d - p_t).abs().sum()
        y, s = (1 - distance / 2).detach(), 1 / (1 + torch.exp(-c))
        out.append((-torch.log(p_d[label]), distance, -(y * torch.log(s) + (1 - y) * torch.log(1 - s))))
    return [torch.stack(column) for column in zip(*out, strict=True)]


@pytest.mark.parametrize("which", ["ce", "tv", "confidence"])
def test_gradients_equal_a_naive_version(which):
    torch.manual_seed(0)
    slots, width, vocab = 6, 5, 11
    features = torch.randn(slots, width, dtype=torch.float64)
    weight, target = torch.randn(vocab, width, dtype=torch.float64), torch.randn(slots, vocab, dtype=torch.float64)
    labels, confidence = torch.randint(vocab, (slots,)), torch.randn(slots, dtype=torch.float64)
    valid = torch.tensor([[[1, 1, 1], [1, 1, 0], [1, 0, 0]]]).bool()
    choose = LossWeights(**{name: float(name == which) for name in ("ce", "tv", "confidence")}, decay=2.0)

    def grads(use_ours: bool):
        leaves = [
            features.clone().requires_grad_(),
            weight.clone().requires_grad_(),
            confidence.clone().requires_grad_(),
        ]
        x, w, c = leaves
        if use_ours:
            parts = chunked_losses((x,), target, None, labels, c, lambda h: h @ w.T, lambda t: t, 4)
            loss = combine(*parts, valid, choose).total
        else:
            k = torch.arange(3, dtype=torch.float64).expand(1, 3, 3)[valid]
            weights = torch.exp(-k / 2.0)
            part = _naive(x @ w.T, target, labels, c)[("ce", "tv", "confidence").index(which)]
            loss = (part * weights).sum() / weights.sum()
        return loss, torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    (ours, got), (naive, wanted) = grads(True), grads(False)
    torch.testing.assert_close(float(ours), float(naive), atol=1e-6, rtol=1e-6)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_reduced_vocabulary_counts_the_mass_outside():
    target = torch.randn(4, 10)
    mass = target.logsumexp(-1)
    draft = target[:, :6].clone()
    ce, distance, _ = slot_losses(draft, target[:, :6], mass, torch.tensor([0, 5, -1, 2]), None)
    inside = target.softmax(-1)[:, :6].sum(-1)
    torch.testing.assert_close(distance, 2 * (1 - inside))  # p_d is p_t renormalised: both halves of the distance
    assert ce[2] == 0 and (ce[[0, 1, 3]] > 0).all()


def test_confidence_gradient_is_bounded():
    sure = torch.tensor([80.0, -80.0], requires_grad=True)
    draft = torch.tensor([[9.0, 0.0], [9.0, 0.0]])
    _, _, loss = slot_losses(draft, draft.flip(-1) * torch.tensor([[1.0], [0.0]]), None, torch.tensor([0, 0]), sure)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and sure.grad.abs().max() <= 1.0


def test_slot_weights():
    weights = slot_weights(torch.ones(1, 1, 3).bool(), 4.0)[0, 0]
    torch.testing.assert_close(weights, torch.exp(torch.tensor([0.0, -0.25, -0.5])))


def test_reduced_head_and_kept_mass_agree(target):
    torch.manual_seed(0)
    config = DSparkConfig.for_target(
        target.config, draft_vocab_size=40, block_size=3, markov_rank=4, target_layer_ids=[0, 2]
    )
    head = DSparkDraftModel(config)
    head.set_draft_vocabulary(torch.randperm(98)[:40])
    objective = DSparkObjective(head, target, num_anchors=4)
    ids = torch.randint(97, (2, 20))
    mask = torch.ones_like(ids)
    out = target(ids, output_hidden_states=True)
    taps, last = torch.cat([out.hidden_states[1], out.hidden_states[3]], -1), out.hidden_states[-1]
    chosen = draw_anchors(mask, 4)
    fresh = objective(ids, mask, taps, last, anchors=chosen)
    kept = objective(
        ids,
        mask,
        taps,
        last,
        target_log_mass=objective.log_mass(last.view(-1, last.shape[-1])).view(2, 20),
        anchors=chosen,
    )
    assert float(fresh.total) == pytest.approx(float(kept.total), abs=1e-5)
    torch.testing.assert_close(
        objective.target_logits(last), out.logits[..., head.draft_token_ids()], atol=1e-4, rtol=1e-4
    )
    fresh.total.backward()
    assert all(p.grad is not None for p in head.parameters())
    assert all(p.grad is None for p in target.parameters())


def test_sampled_slots_have_the_same_loss_in_expectation(target):
    torch.manual_seed(0)
    config = DSparkConfig.for_target(target.config, block_size=4, markov_rank=4, target_layer_ids=[0, 2])
    objective = DSparkObjective(DSparkDraftModel(config), target, LossWeights(decay=1.5), sample_slots=True)
    ids = torch.randint(97, (4, 40))
    mask = torch.ones_like(ids)
    out = target(ids, output_hidden_states=True)
    taps, last = torch.cat([out.hidden_states[1], out.hidden_states[3]], -1), out.hidden_states[-1]
    chosen = draw_anchors(mask, 30)
    with torch.no_grad():
        drawn = [float(objective(ids, mask, taps, last, anchors=chosen).total) for _ in range(20)]
        whole = float(objective.eval()(ids, mask, taps, last, anchors=chosen).total)
        assert float(objective(ids, mask, taps, last, anchors=chosen).total) == whole
    assert sum(drawn) / len(drawn) == pytest.approx(whole, rel=0.02) and len(set(drawn)) > 1
