"""The accept rule by exact enumeration: uniform numbers run over a grid, so frequencies are areas and not samples."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from specdec_hf import verify
from specdec_hf.proposal import Proposal

TARGET = torch.tensor([0.5, 0.3, 0.125, 0.0625, 0.0125])
DRAFT = torch.tensor([0.125, 0.5, 0.0, 0.25, 0.125])


def grid(points: int) -> Tensor:
    """Midpoints of equal cells: the share of points below a bound is that bound, up to one cell."""
    return (torch.arange(points, dtype=torch.float64) + 0.5) / points


# -- draw -------------------------------------------------------------------------------------------------------------


def test_draw_has_the_frequencies_of_its_distribution():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    for scale in (1.0, 0.001, 64.0):  # a residual does not sum to one
        tokens = verify.draw((probs * scale).expand(1000, -1), grid(1000))
        assert torch.equal(torch.bincount(tokens, minlength=6), (probs * 1000).long())


def test_draw_never_returns_a_token_of_probability_zero():
    edges = torch.tensor([0.0, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0, 0.0]).expand(3, -1)
    assert verify.draw(probs, edges).tolist() == [1, 3, 3]
    # Probabilities that do not add up exactly, and a last point that rounds up to the whole sum.
    uneven = torch.rand(200, 37, generator=torch.Generator().manual_seed(3)).float()
    uneven[:, -5:] = 0.0
    last = torch.full((200,), 1.0 - 2.0**-53, dtype=torch.float64)
    assert (verify.draw(uneven, last) == 31).all()


def test_draw_resolves_what_float32_sums_would_lose():
    probs = torch.tensor([[1.0, 2.0**-30, 2.0**-30]])
    total = 1.0 + 2.0**-29
    at = torch.tensor([(1.0 + 1.5 * 2.0**-30) / total], dtype=torch.float64)
    assert verify.draw(probs, at).tolist() == [2]


# -- the parts of the rule --------------------------------------------------------------------------------------------


def test_residual():
    rest = verify.residual(TARGET[None], DRAFT[None])[0]
    assert torch.equal(rest, (TARGET - DRAFT).clamp(min=0))
    assert torch.equal(verify.residual(TARGET[None], torch.zeros(1, 5))[0], TARGET)
    both = verify.residual(torch.stack((TARGET, TARGET)), torch.stack((TARGET, DRAFT)))
    assert torch.equal(both[0], TARGET), "no mass left: the target's own distribution, not zeros"
    assert torch.equal(both[1], rest)
    # A draft that is larger everywhere by rounding leaves no mass either.
    assert torch.equal(verify.residual(TARGET[None], torch.nextafter(TARGET, torch.tensor(2.0))[None])[0], TARGET)


def test_accepts():
    uniforms = torch.tensor([0.0, 0.5, 0.5, 0.999999], dtype=torch.float64)
    target, draft = torch.tensor([0.0, 0.25, 0.26, 0.5]), torch.tensor([0.5, 0.5, 0.5, 0.5])
    # p_target = 0 is never accepted, not even by u = 0; a ratio of one always is.
    assert verify.accepts(target, draft, uniforms).tolist() == [False, False, True, True]
    assert verify.accepts(target, None, uniforms).tolist() == [False, False, False, False]


def test_accepts_is_exact_where_the_ratio_is_tiny():
    below = torch.tensor([2.0**-40], dtype=torch.float64)
    assert not verify.accepts(torch.tensor([2.0**-42]), torch.tensor([0.5]), below).any()
    assert verify.accepts(torch.tensor([2.0**-40]), torch.tensor([0.5]), below).all()


def test_draft_rows():
    tokens = torch.tensor([[1, 2], [3, 0], [0, 1]])
    position, rejected = torch.tensor([0, 1, 1]), torch.tensor([True, True, False])
    onehot = verify.draft_rows(Proposal(tokens, [2, 2, 2]), position, rejected, 4)
    assert onehot.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    probs = torch.rand(3, 2, 4)
    whole = verify.draft_rows(Proposal(tokens, [2, 2, 2], probs[..., 0], probs), position, rejected, 4)
    assert torch.equal(whole[0], probs[0, 0]) and torch.equal(whole[1], probs[1, 1]) and not whole[2].any()
    ids = torch.tensor([0, 2, 3, 6])
    reduced = verify.draft_rows(Proposal(tokens, [2, 2, 2], probs[..., 0], probs, ids), position, rejected, 8)
    assert torch.equal(reduced[:2][:, ids], whole[:2])
    assert not reduced[:, [1, 4, 5, 7]].any() and reduced.shape == (3, 8)


# -- the whole rule ---------------------------------------------------------------------------------------------------


def emitted(target: Tensor, draft: Tensor, judge: object = verify.verify_sampled) -> Tensor:
    """Exact distribution of the first token that one drafted place yields: uniforms integrated over a grid."""
    total = torch.zeros(len(target), dtype=torch.float64)
    points = 400
    first, second = (u.flatten() for u in torch.meshgrid(grid(points), grid(25), indexing="ij"))
    uniforms = torch.stack((first, second), dim=1)
    for token, probability in enumerate(draft.tolist()):
        if not probability:
            continue
        rows = len(uniforms)
        proposal = Proposal(
            torch.full((rows, 1), token), [1] * rows, draft[token].expand(rows, 1), draft.expand(rows, 1, -1)
        )  # fmt: skip
        verdict = judge(target.expand(rows, 2, -1), proposal, uniforms)
        tokens = torch.where(verdict.accepted > 0, token, verdict.next_tokens)
        total += probability * torch.bincount(tokens, minlength=len(target)).double() / rows
    return total


@pytest.mark.parametrize("seed", range(6))
def test_one_place_yields_the_target_distribution(seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(5, generator=generator).pow(3)
    draft = torch.rand(5, generator=generator).pow(3)
    if seed % 2:
        target[seed % 5], draft[(seed + 2) % 5] = 0.0, 0.0
    target, draft = target / target.sum(), draft / draft.sum()
    torch.testing.assert_close(emitted(target, draft), target.double(), atol=0.012, rtol=0)  # the grid of 25


@pytest.mark.parametrize("change", ["no residual", "always accepts", "never accepts"])
def test_a_wrong_rule_is_seen(change, monkeypatch):
    if change == "no residual":
        monkeypatch.setattr(verify, "residual", lambda target_probs, draft_probs: target_probs)
    elif change == "always accepts":
        monkeypatch.setattr(verify, "accepts", lambda target, draft, uniforms: uniforms < 2)
    else:
        monkeypatch.setattr(verify, "accepts", lambda target, draft, uniforms: uniforms > 2)
    assert (emitted(TARGET, DRAFT) - TARGET.double()).abs().max() > 0.05


def test_ratio_in_half_precision_is_seen(monkeypatch):
    """p = 0.001 against q = 0.5 must pass once in 500; with eight bits of uniform number it passes once in 256."""
    rows = 2**18
    uniforms = torch.stack((grid(rows), torch.zeros(rows, dtype=torch.float64)), dim=1)
    target, draft = torch.tensor([0.001, 0.999]), torch.tensor([0.5, 0.5])
    proposal = Proposal(
        torch.zeros(rows, 1, dtype=torch.long), [1] * rows, draft[0].expand(rows, 1), draft.expand(rows, 1, 2)
    )
    accepted = verify.verify_sampled(target.expand(rows, 2, 2), proposal, uniforms).accepted.double().mean()
    assert abs(accepted - 0.002) < 1e-5

    def in_bf16(target_token_probs, draft_token_probs, uniforms):
        coarse = (uniforms * 256).floor() / 256  # what torch.rand(dtype=torch.bfloat16) returns
        return coarse.bfloat16() < (target_token_probs.bfloat16() / draft_token_probs.bfloat16())

    monkeypatch.setattr(verify, "accepts", in_bf16)
    wrong = verify.verify_sampled(target.expand(rows, 2, 2), proposal, uniforms).accepted.double().mean()
    assert abs(wrong - 1 / 256) < 1e-5


def test_accepted_prefix_and_token_that_follows():
    """Places 0 and 1 pass, place 2 does not: two are kept, whatever place 3 says, and the residual is place 2's."""
    vocab = 4
    tokens = torch.tensor([[0, 1, 2, 3]])
    probs = torch.full((1, 4, vocab), 0.25)
    target = torch.full((1, 5, vocab), 0.25)
    target[0, 2] = torch.tensor([0.0, 0.75, 0.0, 0.25])  # of it, 0.5 of token 1 is left over the draft's 0.25
    proposal = Proposal(tokens, [4], probs[..., 0], probs)
    verdict = verify.verify_sampled(target, proposal, torch.full((1, 5), 0.999, dtype=torch.float64))
    assert (verdict.accepted.tolist(), verdict.next_tokens.tolist()) == ([2], [1])
    target[0, 2] = 0.25
    for last in (0.1, 0.3, 0.6, 0.9):  # all kept: the bonus token comes from the last place, nothing subtracted
        uniforms = torch.full((1, 5), last, dtype=torch.float64)
        verdict = verify.verify_sampled(target, proposal, uniforms)
        assert (verdict.accepted.tolist(), verdict.next_tokens.tolist()) == ([4], [int(last * 4)])


def test_shorter_rows_end_with_a_plain_draw():
    """A row that proposes one token of a block of three draws from the target after it, with nothing subtracted."""
    probs = torch.zeros(2, 3, 3)
    probs[..., 0] = 1.0
    proposal = Proposal(torch.zeros(2, 3, dtype=torch.long), [1, 0], probs[..., 0], probs)
    target = torch.tensor([1.0, 0.0, 0.0]).expand(2, 4, 3)
    verdict = verify.verify_sampled(target, proposal, torch.full((2, 4), 0.5, dtype=torch.float64))
    assert verdict.accepted.tolist() == [1, 0]
    assert verdict.next_tokens.tolist() == [0, 0]


def test_block_without_drafts_draws_from_the_target():
    proposal = Proposal(torch.zeros(100, 0, dtype=torch.long), [0] * 100)
    uniforms = torch.stack((torch.zeros(100, dtype=torch.float64), grid(100)), dim=1)[:, 1:]
    target = torch.tensor([0.25, 0.75]).expand(100, 1, 2)
    verdict = verify.verify_sampled(target, proposal, uniforms)
    assert verdict.next_tokens.sum() == 75 and not verdict.accepted.any()


# -- one rule, three forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_probs", [False, True])
def test_greedy_is_the_one_hot_case(with_probs):
    """All blocks of 2 on 3 tokens against all choices of the target: the same verdicts, whatever the numbers."""
    blocks = torch.tensor(list(itertools.product(range(3), repeat=2)))
    choices = torch.tensor(list(itertools.product(range(3), repeat=3)))
    tokens, chosen = blocks.repeat_interleave(len(choices), 0), choices.repeat(len(blocks), 1)
    rows = len(tokens)
    lengths = [row % 3 for row in range(rows)]
    onehot = torch.nn.functional.one_hot(tokens, 3).float()
    proposal = Proposal(tokens, lengths, *((onehot.amax(-1), onehot) if with_probs else (None, None)))
    uniforms = torch.rand(rows, 3, dtype=torch.float64)
    greedy = verify.verify_greedy(chosen, proposal)
    sampled = verify.verify_sampled(torch.nn.functional.one_hot(chosen, 3).float(), proposal, uniforms)
    assert torch.equal(greedy.accepted, sampled.accepted)
    assert torch.equal(greedy.next_tokens, sampled.next_tokens)
    assert greedy.accepted.max() == 2 and greedy.accepted.min() == 0


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_place_by_place_is_the_same_rule(do_sample, reduced):
    rows, width, vocab = 200, 3, 6
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, width + 1, vocab, generator=generator) * 2
    ids = torch.tensor([0, 2, 3, 5]) if reduced else None
    probs = torch.rand(rows, width, 4 if reduced else vocab, generator=generator)
    probs /= probs.sum(-1, keepdim=True)
    columns = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(rows, width)
    token_probs = probs.gather(2, columns[..., None]).squeeze(2)
    tokens = columns if ids is None else ids[columns]
    lengths = [row % 4 for row in range(rows)]
    proposal = Proposal(tokens, lengths, token_probs if do_sample else None, probs if do_sample else None, ids)
    uniforms = torch.rand(rows, width + 1, dtype=torch.float64, generator=generator)
    if do_sample:
        whole = verify.verify_sampled(scores.softmax(-1), proposal, uniforms)
    else:
        whole = verify.verify_greedy(scores.argmax(-1), proposal)
    for row in range(rows):
        one = Proposal(
            tokens[row : row + 1], [lengths[row]],
            *(None if t is None else t[row : row + 1] for t in (proposal.token_probs, proposal.probs)), ids,
        )  # fmt: skip
        accepted = 0
        for place in range(width + 1):
            pair = uniforms[row : row + 1, [min(place, width), width]]
            kept, token = verify.verify_position(scores[row : row + 1, place], one, place, pair, do_sample)
            if not kept:
                break
            assert token.item() == tokens[row, place]
            accepted += 1
        assert (accepted, token.item()) == (whole.accepted[row].item(), whole.next_tokens[row].item())
    assert whole.accepted.max() >= 2 and whole.accepted.min() == 0
