"""Processors over a block against one call per position; the sampler's distributions; the random stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from specdec_hf.processors import DraftSampler, ProcessorStack, UniformStream

V = 12
FIXED = [
    hf.TemperatureLogitsWarper(0.7),
    hf.TopKLogitsWarper(7),
    hf.TopPLogitsWarper(0.8),
    hf.MinPLogitsWarper(0.1),
    hf.TypicalLogitsWarper(0.8),
    hf.EpsilonLogitsWarper(0.05),
    hf.EtaLogitsWarper(0.1),
    hf.SuppressTokensLogitsProcessor([3], device="cpu"),
]
PREFIX = [
    hf.RepetitionPenaltyLogitsProcessor(1.5),
    hf.NoRepeatNGramLogitsProcessor(2),
    hf.MinLengthLogitsProcessor(6, 2),
    hf.ForcedEOSTokenLogitsProcessor(8, 2),
    hf.NoBadWordsLogitsProcessor([[4], [5, 6]], eos_token_id=2),
    hf.ExponentialDecayLengthPenalty((3, 1.5), 2, 3),
    hf.SuppressTokensAtBeginLogitsProcessor([7], 5),
]


class User(hf.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize("rule", [*FIXED, *PREFIX], ids=lambda rule: type(rule).__name__)
def test_block_equals_one_call_per_position(rule):
    """Ragged rows: each position sees its own row's prefix and nothing behind it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, V, (3, 10), generator=generator)
    ids[:, 4:6] = torch.tensor([5, 6])
    scores = torch.randn(3, 3, V, generator=generator) * 2
    starts = [5, 3, 5]
    stack = ProcessorStack(LogitsProcessorList([rule]))
    assert not stack.in_order
    got = stack.block(ids, starts, scores.clone())
    for row, start in enumerate(starts):
        for place in range(3):
            prefix = ids[row : row + 1, : start + place]
            torch.testing.assert_close(got[row, place], rule(prefix, scores[row : row + 1, place].clone())[0])
    got = stack.draft(ids, starts, scores[:, 0].clone())
    for row, start in enumerate(starts):
        torch.testing.assert_close(got[row], rule(ids[row : row + 1, :start], scores[row : row + 1, 0].clone())[0])


def test_what_must_be_called_in_order():
    pure = User()
    pure.pure_function_of_prefix = True
    derived = type("Derived", (hf.TemperatureLogitsWarper,), {})(0.5)  # a subclass may do anything
    for rules, expected in (
        ([], False),
        (FIXED, False),
        (PREFIX, False),
        ([pure], False),
        ([User()], True),
        ([derived], True),
    ):
        assert ProcessorStack(LogitsProcessorList(rules)).in_order is expected
    assert ProcessorStack(LogitsProcessorList([])).is_empty


def test_penalty_that_ignores_a_prompt_per_row_follows_its_rows():
    try:
        rule = hf.RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=torch.tensor([4, 0, 2]))
    except ValueError:
        pytest.skip("one number for all rows before transformers 5.20")
    ids, scores = torch.tensor([[3, 4, 5, 6, 7, 8]] * 3), torch.ones(3, 1, V)
    stack = ProcessorStack(LogitsProcessorList([rule]))
    whole = stack.block(ids, [6, 6, 6], scores.clone())
    stack.select_rows([2, 0])
    assert torch.equal(stack.block(ids[[2, 0]], [6, 6], scores[[2, 0]].clone()), whole[[2, 0]])
    assert not torch.equal(whole[0], whole[1])


# -- drafting ---------------------------------------------------------------------------------------------------------


def sampler(rules: list[object], do_sample: bool = True, rows: int = 2) -> tuple[DraftSampler, Tensor]:
    ids = torch.zeros(rows, 10, dtype=torch.long)
    ids[:, :4] = torch.tensor([3, 4, 5, 4])
    stack = ProcessorStack(LogitsProcessorList(rules))
    uniforms = torch.full((rows, 3), 0.5, dtype=torch.float64)
    draws = uniforms if do_sample else None
    return DraftSampler(stack, ids, [4] * rows, torch.tensor([4] * rows), V, draws), ids


def test_drafted_tokens_are_written_behind_the_prefix_and_seen_by_processors():
    draft, ids = sampler([hf.NoRepeatNGramLogitsProcessor(1)], do_sample=False)
    logits = torch.arange(V).float().expand(2, -1)
    assert [draft.sample(logits).tolist() for _ in range(3)] == [[11, 11], [10, 10], [9, 9]]
    assert ids[0, :8].tolist() == [3, 4, 5, 4, 11, 10, 9, 0]
    tokens, *rest = draft.drafted()
    assert tokens.tolist() == [[11, 10, 9]] * 2 and rest == [None, None, None]


@pytest.mark.parametrize("by_id", [False, True])
def test_reduced_vocabulary(by_id):
    """Processors that know token ids get columns of all ids; others the draft's own columns."""
    vocabulary = torch.tensor([1, 4, 9])
    draft, _ = sampler([hf.SuppressTokensLogitsProcessor([4], device="cpu")] if by_id else [hf.TopKLogitsWarper(2)])
    tokens = draft.sample(torch.tensor([[0.0, 9.0, 1.0]] * 2, dtype=torch.bfloat16), vocabulary)
    _, token_probs, probs, columns = draft.drafted()
    assert probs.dtype == torch.float32
    if by_id:
        assert columns is None and probs.shape == (2, 1, V)
        assert probs[0, 0].nonzero().flatten().tolist() == [1, 9] and tokens.tolist() == [9, 9]
    else:
        assert torch.equal(columns, vocabulary) and probs.shape == (2, 1, 3) and tokens.tolist() == [4, 4]
        assert probs[0, 0, 0] == 0
    assert torch.equal(token_probs[0], probs.amax(-1)[0])


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize(
    "rules", [[], [hf.EtaLogitsWarper(0.1), hf.TypicalLogitsWarper(0.5), hf.TopPLogitsWarper(0.9)]]
)
def test_nothing_to_draw_from(bad, rules):
    """A broken head, or processors that forbid all it knows: some token is drafted, with a true distribution."""
    if rules and bad == float("-inf"):
        rules = rules[1:]  # transformers' eta warper itself refuses a row without any token
    draft, _ = sampler(rules)
    tokens = draft.sample(torch.full((2, V), bad))
    _, token_probs, probs, _ = draft.drafted()
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 1))
    assert (token_probs > 0).all() and torch.equal(token_probs, probs.gather(2, tokens[:, None, None]).squeeze(2))


# -- random numbers ---------------------------------------------------------------------------------------------------


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_a_row_gets_the_same_numbers_in_any_company():
    cpu = torch.device("cpu")
    alone, together = UniformStream(generators(2), 1, cpu), UniformStream(generators(1, 2, 3), 3, cpu)
    for limit, others in ((0, 0), (2, 4), (3, 3), (1, 4)):
        one = alone.take([0], [limit], limit)
        width = max(limit, others)
        many = together.take([2, 1], [others, limit], width)  # rows 2 and 1 are left, in that order
        assert many.shape == (2, 2 * width + 1) and many.dtype == torch.float64
        assert torch.equal(many[1, :limit], one[0, :limit])
        assert torch.equal(many[1, width : width + limit], one[0, limit : 2 * limit])
        assert many[1, -1] == one[0, -1]


def test_streams():
    cpu = torch.device("cpu")
    torch.manual_seed(1)
    first = UniformStream(None, 2, cpu).take([0, 1], [2, 2], 2)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(2, 5, dtype=torch.float64), first)
    own = [UniformStream(generators(4)[0], 2, cpu).take([0, 1], [2, 2], 2) for _ in range(2)]
    assert torch.equal(*own) and not torch.equal(own[0][0], own[0][1])
    with pytest.raises(ValueError, match="2 entries for 3 rows"):
        UniformStream(generators(1, 2), 3, cpu)
