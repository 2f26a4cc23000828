"""The training objective: against DeepSpec's numbers, and its gradients against a naive float64 version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec_hf.heads.dspark import DSparkConfig, DSparkDraftModel
from specdec_hf.training.features import log_mass
from specdec_hf.training.losses import (
    LossWeights,
    confidence_loss,
    draw_anchors,
    make_blocks,
    slot_weights,
    text_starts,
)
from specdec_hf.training.objective import DSparkObjective
from specdec_hf.training.projection import Slots, projected_losses

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
        projected_losses((torch.zeros(1, 2),), (), identity_slots(torch.zeros(1, 2)), lambda x: x, lambda x: x, 0)


def test_blocks_end_with_their_text():
    ids, mask = torch.arange(10)[None], torch.ones(1, 10)
    segments = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    anchors, keep = torch.tensor([[1, 5]]), torch.ones(1, 2).bool()
    blocks = make_blocks(ids, mask, anchors, keep, 4, segments)
    assert blocks.valid[0].tolist() == [[True, True, False, False]] * 2
    assert blocks.starts.tolist() == [[0, 4]]
    assert text_starts(segments).tolist() == [[0, 0, 0, 0, 4, 4, 4, 4, 8, 8]]


def identity_slots(target, labels=None, mass=None, ce_scale=1.0, tv_scale=1.0) -> Slots:
    """Slots that each have a place of their own, in order."""
    count = len(target)
    labels = torch.zeros(count, dtype=torch.int64) if labels is None else labels
    scales = [torch.as_tensor(scale).expand(count) for scale in (ce_scale, tv_scale)]
    return Slots(target, mass, torch.arange(count), labels, *scales)


def _naive(draft, target, labels, confidence):
    """Written out per slot in float64, with no shared code."""
    out = []
    for d, t, label, c in zip(draft, target, labels, confidence, strict=True):
        p_d, p_t = torch.exp(d) / torch.exp(d).sum(), torch.exp(t) / torch.exp(t).sum()
        distance = (p_d - p_t).abs().sum()
        y, s = (1 - distance / 2).detach(), 1 / (1 + torch.exp(-c))
        out.append((-torch.log(p_d[label]), distance, -(y * torch.log(s) + (1 - y) * torch.log(1 - s))))
    return [torch.stack(column) for column in zip(*out, strict=True)]


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("which", ["ce", "tv", "both"])
def test_gradients_equal_a_naive_version(which, chunk):
    """Values and gradients, also where slots share a place of the target, which a chunk computes once."""
    torch.manual_seed(0)
    slots, width, vocab = 9, 5, 11
    features = torch.randn(slots, width, dtype=torch.float64)
    weight, hidden = torch.randn(vocab, width, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    head = torch.randn(vocab, 3, dtype=torch.float64)
    places, labels = torch.tensor([0, 1, 2, 1, 2, 3, 5, 4, 4]), torch.randint(vocab, (slots,))
    ce_scale, tv_scale = torch.rand(slots, dtype=torch.float64), torch.rand(slots, dtype=torch.float64)
    ce_scale, tv_scale = ce_scale * (which != "tv"), tv_scale * (which != "ce")

    def grads(use_ours: bool):
        x, w = features.clone().requires_grad_(), weight.clone().requires_grad_()
        if use_ours:
            task = Slots(hidden, None, places, labels, ce_scale, tv_scale)
            loss = projected_losses((x,), (w,), task, lambda h: h @ w.T, lambda h: h @ head.T, chunk)[0]
        else:
            ce, distance, _ = _naive(x @ w.T, (hidden @ head.T)[places], labels, torch.zeros(slots))
            loss = (ce * ce_scale + distance * tv_scale).sum()
        return loss.detach(), torch.autograd.grad(3 * loss, (x, w))

    (ours, got), (naive, wanted) = grads(True), grads(False)
    torch.testing.assert_close(ours, naive, atol=1e-12, rtol=1e-12)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


def test_confidence_gradient_equals_a_naive_version():
    torch.manual_seed(0)
    draft, target = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    confidence = torch.randn(5, dtype=torch.float64, requires_grad=True)
    _, distance, wanted = _naive(draft, target, torch.zeros(5, dtype=torch.int64), confidence)
    ours = confidence_loss(confidence, distance)
    torch.testing.assert_close(ours, wanted)
    gradients = [torch.autograd.grad(loss.sum(), confidence, retain_graph=True)[0] for loss in (ours, wanted)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-10)


def test_objective_equals_a_naive_version_in_float64(target):
    """The whole objective, with a Markov head, a confidence head, a reduced vocabulary and padding: every gradient."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float64).eval()
    config = DSparkConfig.for_target(
        target.config,
        draft_vocab_size=40,
        block_size=3,
        markov_rank=4,
        markov_head_type="gated",
        target_layer_ids=[0, 2],
    )
    head = DSparkDraftModel(config).double()
    head.set_draft_vocabulary(torch.randperm(98)[:40])
    objective = DSparkObjective(head, target, LossWeights(0.3, 0.8, 0.5, 2.0), chunk=5)
    ids, mask = torch.randint(97, (2, 12)), torch.ones(2, 12)
    mask[0, 9:] = 0
    out = target(ids, output_hidden_states=True)
    taps, last = torch.cat([out.hidden_states[1], out.hidden_states[3]], -1), out.hidden_states[-1]
    anchors, keep = torch.tensor([[1, 6, 7], [0, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    ours = objective(ids, mask, taps, last, anchors=(anchors, keep))
    got = torch.autograd.grad(ours.total, list(head.parameters()))

    # One slot after the other, from the head's own training forward.
    output = head(ids, taps, anchors)
    draft_ids, total, norm = head.draft_token_ids().tolist(), 0.0, 0.0
    for row, block in keep.nonzero().tolist():
        for slot in range(3):
            place = int(anchors[row, block]) + slot + 1
            if place >= 12 or mask[row, place] == 0:
                break
            weight = float(torch.exp(torch.tensor(-slot / 2.0, dtype=torch.float64)))
            p_d = output.logits[row, block, slot].softmax(-1)
            p_t = target.lm_head(last[row, place - 1]).softmax(-1)
            inside = p_t[draft_ids]
            distance = (p_d - inside).abs().sum() + 1 - inside.sum()
            label = int(ids[row, place])
            ce = -p_d[draft_ids.index(label)].log() if label in draft_ids else 0.0
            s, y = output.confidence_logits[row, block, slot].sigmoid(), (1 - distance / 2).detach()
            total = total + weight * (0.3 * ce + 0.8 * distance - 0.5 * (y * s.log() + (1 - y) * (1 - s).log()))
            norm += weight
    wanted = torch.autograd.grad(total / norm, list(head.parameters()))
    torch.testing.assert_close(ours.total, total / norm, atol=1e-6, rtol=1e-6)  # the weights of slots are float32
    for (name, _), one, other in zip(head.named_parameters(), got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5, msg=name)


def test_reduced_vocabulary_counts_the_mass_outside():
    target = torch.randn(4, 10)
    labels = torch.tensor([0, 5, -1, 2])
    slots = identity_slots(target[:, :6], labels, target.logsumexp(-1))
    draft = target[:, :6].clone().requires_grad_()
    total, ce, distance = projected_losses((draft,), (), slots, lambda x: x * 1.0, lambda x: x)
    inside = target.softmax(-1)[:, :6].sum(-1)
    torch.testing.assert_close(distance, 2 * (1 - inside))  # p_d is p_t renormalised: both halves of the distance
    assert ce[2] == 0 and (ce[[0, 1, 3]] > 0).all()
    total.backward()
    assert not ce.requires_grad and draft.grad[2].abs().max() < 1.0


def test_no_gradient_is_made_where_none_is_wanted():
    features, calls = torch.randn(3, 4), []

    def projection(x):
        calls.append(x.requires_grad)
        return x * 1.0

    slots = identity_slots(torch.randn(3, 4))
    assert not projected_losses((features,), (), slots, projection, lambda x: x)[0].requires_grad
    with torch.no_grad():
        projected_losses((features.requires_grad_(),), (), slots, projection, lambda x: x)
    assert calls == [False, False]


def test_confidence_gradient_is_bounded():
    """Heads that are very sure and wrong, or sure and right: finite loss, a gradient of at most 1 a slot."""
    sure = torch.tensor([80.0, -80.0, 1e4, -1e4, 300.0], requires_grad=True)
    loss = confidence_loss(sure, torch.tensor([2.0, 0.0, 2.0, 0.0, 0.0]))
    loss.sum().backward()
    assert torch.isfinite(loss).all() and sure.grad.abs().max() <= 1.0
    torch.testing.assert_close(sure.grad, torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0]))


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
        target_log_mass=log_mass(target, last.view(-1, last.shape[-1]), 98).view(2, 20),
        anchors=chosen,
    )
    assert float(fresh.total.detach()) == pytest.approx(float(kept.total.detach()), abs=1e-5)
    torch.testing.assert_close(
        objective.target_logits(last), out.logits[..., head.draft_token_ids()], atol=1e-4, rtol=1e-4
    )
    fresh.total.backward()
    assert all(p.grad is not None for p in head.parameters())
    assert all(p.grad is None for p in target.parameters())


def test_sampled_slots_have_the_same_loss_in_expectation(target):
    torch.manual_seed(0)
    config = DSparkConfig.for_target(target.config, block_size=4, markov_rank=4, target_layer_ids=[0, 2])
    objective = DSparkObjective(DSparkDraftModel(config), target, LossWeights(decay=1.5))
    ids = torch.randint(97, (4, 40))
    mask = torch.ones_like(ids)
    out = target(ids, output_hidden_states=True)
    taps, last = torch.cat([out.hidden_states[1], out.hidden_states[3]], -1), out.hidden_states[-1]
    chosen = draw_anchors(mask, 30)
    with torch.no_grad():
        dice = [torch.rand(4, 30, 4) for _ in range(20)]
        drawn = [float(objective(ids, mask, taps, last, anchors=chosen, dice=one).total) for one in dice]
        whole = float(objective(ids, mask, taps, last, anchors=chosen).total)
    assert sum(drawn) / len(drawn) == pytest.approx(whole, rel=0.02) and len(set(drawn)) > 1
    none = objective(ids, mask, taps, last, anchors=chosen, dice=torch.ones(4, 30, 4)).total
    none.backward()
    assert float(none.detach()) == 0 and all(not p.grad.any() for p in objective.head.parameters())
