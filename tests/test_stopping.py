"""Stopping rules inside a block against the same criteria called once per token."""

from __future__ import annotations

import time

import pytest
import torch
from conftest import make_tokenizer
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria as hf

from specdec_hf.stopping import StoppingRules

PROMPT = [5, 6, 7]


def judged(criteria: list[StoppingCriteria], tokens: list[int], prompt: list[int] = PROMPT) -> tuple[int, bool]:
    ids = torch.zeros(2, 20, dtype=torch.long)
    ids[1, : len(prompt) + len(tokens)] = torch.tensor([*prompt, *tokens])
    return StoppingRules(StoppingCriteriaList(criteria), 1).judge(ids, 1, len(prompt), tokens)


def one_by_one(criteria: list[StoppingCriteria], tokens: list[int], prompt: list[int] = PROMPT) -> tuple[int, bool]:
    for kept in range(1, len(tokens) + 1):
        if StoppingCriteriaList(criteria)(torch.tensor([[*prompt, *tokens[:kept]]]), None).any():
            return kept, True
    return len(tokens), False


@pytest.mark.parametrize(
    ("criteria", "tokens", "expected"),
    [
        ([], [2, 2, 2], (3, False)),
        ([hf.EosTokenCriteria(torch.tensor([2, 9]))], [4, 9, 2], (2, True)),
        ([hf.EosTokenCriteria(torch.tensor([2]))], [2], (1, True)),
        ([hf.EosTokenCriteria(torch.tensor([5]))], [4, 4], (2, False)),  # a stop token of the prompt does not count
        ([hf.MaxLengthCriteria(5)], [4, 4, 4], (2, True)),
        ([hf.MaxLengthCriteria(6)], [4, 4], (2, False)),
        ([hf.MaxLengthCriteria(5), hf.EosTokenCriteria(torch.tensor([2]))], [2, 4, 4], (1, True)),
        ([hf.MaxTimeCriteria(0.0, initial_timestamp=0.0)], [4, 4], (1, True)),
        ([hf.MaxTimeCriteria(1e6, initial_timestamp=time.time())], [4, 4], (2, False)),
    ],
)
def test_first_stop_in_a_block(criteria, tokens, expected):
    assert judged(criteria, tokens) == expected == one_by_one(criteria, tokens)


def test_stop_string_in_mid_block_and_across_blocks():
    tokenizer = make_tokenizer()
    rule = [hf.StopStringCriteria(tokenizer, ["lo"])]
    prompt, block = tokenizer.encode("hel"), tokenizer.encode("o lot")
    for tokens in (block, block[1:]):
        expected = one_by_one(rule, tokens, prompt)
        assert judged(rule, tokens, prompt) == expected
    assert judged(rule, block, prompt) == (1, True)
    assert judged(rule, block[1:], prompt) == (3, True)


def test_which_criteria_need_every_position_in_order():
    class User(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    class Longer(hf.MaxLengthCriteria):  # a subclass may do anything
        pass

    eos, clock, limit = hf.EosTokenCriteria(torch.tensor([2])), hf.MaxTimeCriteria(9.0), hf.MaxLengthCriteria(9)
    cases = [([eos, limit], 3, False), ([User()], 1, True), ([Longer(9)], 1, True), ([clock, eos], 3, False)]
    # without end-of-sequence ids, plain decoding lets rows that the clock ended grow until all have ended
    cases += [([clock], 1, False), ([clock], 3, True)]
    for criteria, rows, expected in cases:
        rules = StoppingRules(StoppingCriteriaList(criteria), rows)
        assert rules.in_order is expected
        assert rules.pads_finished_rows is (eos in criteria)
    assert StoppingRules(StoppingCriteriaList([limit]), 1).max_length == 9
    assert StoppingRules(StoppingCriteriaList([]), 1).max_length > 2**40
