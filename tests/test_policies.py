"""How many tokens are drafted, and where a block is cut: at the first token that falls below the threshold."""

from __future__ import annotations

import pytest
import torch

from specdec_hf.policies import SCHEDULES, WINDOW, Bounds, confident_lengths, make_schedule
from specdec_hf.proposal import Round

CONFIDENCE = torch.tensor([[0.9, 0.4, 0.9, 0.9], [0.5, 0.5, 0.5, 0.1], [0.2, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]])


@pytest.mark.parametrize(
    ("threshold", "expected"), [(0.5, [1, 3, 0, 4]), (0.95, [0, 0, 0, 0]), (0.1, [4, 4, 4, 4]), (0.4, [4, 3, 0, 4])]
)
def test_cut_at_the_first_low_confidence(threshold, expected):
    assert confident_lengths(CONFIDENCE, [4, 4, 4, 4], threshold) == expected
    assert confident_lengths(CONFIDENCE, [2, 0, 4, 3], threshold) == [
        min(length, limit) for length, limit in zip(expected, [2, 0, 4, 3], strict=True)
    ]


def test_nan_cuts():
    assert confident_lengths(torch.tensor([[0.9, float("nan"), 0.9]]), [3], 0.1) == [1]


def test_token_k_does_not_depend_on_what_follows():
    """Changing the confidence of later tokens never changes whether an earlier one stays."""
    changed = CONFIDENCE.clone()
    changed[:, 2:] = torch.rand(4, 2)
    for before, after in zip(
        confident_lengths(CONFIDENCE, [4] * 4, 0.5), confident_lengths(changed, [4] * 4, 0.5), strict=True
    ):
        assert min(before, 2) == min(after, 2)


# -- schedules --------------------------------------------------------------------------------------------------------

BOUNDS = Bounds(start=5, minimum=2, maximum=8, acceptance_target=0.6)


class Target:
    """Something that can be held weakly."""


def schedule(name, rows=1, bounds=BOUNDS, target=None, drafter=("x",)):
    return make_schedule(name, bounds, rows, target or Target(), drafter)


def after(name, rounds, number=0):
    """Tokens of a row after rounds (proposed, accepted)."""
    one, _ = schedule(name, rows=number + 1)
    for proposed, accepted in rounds:
        one.learn(number, Round(proposed, accepted, accepted + 1))
    return one.limits([number])[0]


@pytest.mark.parametrize("name", [None, "constant"])
def test_constant_stays(name):
    one, _ = schedule(name)
    assert one.maximum == 5
    for _ in range(9):
        one.learn(0, Round(5, 5, 6))
    assert one.limits([0]) == [5]


@pytest.mark.parametrize("name", ["heuristic", "heuristic_transient"])
def test_heuristic_as_in_transformers(name):
    assert after(name, [(5, 5)]) == 7
    assert after(name, [(5, 4)]) == 4
    assert after(name, [(5, 5), (7, 7)]) == 8, "not beyond the maximum"
    assert after(name, [(5, 0)] * 9) == 2, "not below the minimum"
    assert after(name, [(0, 0)] * 9) == 5, "a round that drafted nothing teaches nothing"
    assert after(name, [(5, 5)], number=3) == 7
    assert schedule(name)[0].maximum == 8


def test_only_heuristic_lasts():
    target = Target()
    for name in SCHEDULES:
        one, remember = schedule(name, target=target)
        for _ in range(WINDOW):
            one.learn(0, Round(5, 5, 6))
        remember()
        begins = 8 if name == "heuristic" else 5
        assert schedule(name, target=target)[0].limits([0]) == [begins], name
    assert schedule("heuristic", target=target, drafter=("other",))[0].limits([0]) == [5]
    assert schedule("heuristic", target=Target())[0].limits([0]) == [5]


def test_heuristic_of_a_batch_goes_on_from_the_mean():
    target = Target()
    one, remember = schedule("heuristic", rows=3, target=target)
    for row, accepted in enumerate((5, 5, 0)):
        one.learn(row, Round(5, accepted, accepted + 1))
    assert one.limits([2, 0]) == [4, 7]
    remember()
    assert schedule("heuristic", target=target)[0].limits([0]) == [6]


def test_adaptive_moves_when_the_window_is_full():
    assert after("adaptive", [(5, 4)] * (WINDOW - 1)) == 5
    assert after("adaptive", [(5, 4)] * WINDOW) == 6  # 0.8 > 0.6 + 0.1
    assert after("adaptive", [(5, 2)] * WINDOW) == 4  # 0.4 < 0.6 - 0.1
    assert after("adaptive", [(5, 3)] * 3 * WINDOW) == 5  # within the margin
    assert after("adaptive", [(5, 5)] * 9 * WINDOW) == 8
    assert after("adaptive", [(5, 0)] * 9 * WINDOW) == 2
    assert after("adaptive", [(0, 0)] * 9 * WINDOW) == 5


def test_adaptive_rows_are_their_own():
    one, _ = schedule("adaptive", rows=2)
    for _ in range(WINDOW):
        one.learn(0, Round(5, 5, 6))
        one.learn(1, Round(5, 0, 1))
    assert one.limits([0, 1]) == [6, 4]
    assert one.limits([1]) == [4]


def test_adaptive_settles_where_acceptance_meets_the_target():
    """Tokens accepted with probability 0.8 each: rounds of about 4 have 0.6 of theirs accepted."""
    generator = torch.Generator().manual_seed(0)
    one, _ = schedule("adaptive", bounds=Bounds(8, 1, 16, 0.6))
    seen = []
    for _ in range(2000):
        width = one.limits([0])[0]
        kept = (torch.rand(width, generator=generator) < 0.8).long().cumprod(0).sum().item()
        one.learn(0, Round(width, kept, kept + 1))
        seen.append(width)
    assert 3 <= sum(seen[200:]) / 1800 <= 6
