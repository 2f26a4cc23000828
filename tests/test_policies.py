"""How many tokens are drafted, and where a block is cut: at the first token that falls below the threshold."""

from __future__ import annotations

import pytest
import torch

from specdec_hf.policies import (
    SCHEDULES,
    WINDOW,
    AcceptanceRates,
    AutomaticOff,
    Bounds,
    RowPaces,
    admitted_lengths,
    confident_lengths,
    make_schedule,
)
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


# -- throughput -------------------------------------------------------------------------------------------------------

TARGET, DRAFT = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
SPEED = (1.0, 0.5, 0.45)  # target steps per second with 1, 2, 3 tokens in the forward


def linear(tokens):
    return 1.0 + 0.15 * tokens


def beyond_the_drop(survival, seconds):
    """The wrong search: the best of all lengths, also those behind a drop (one row)."""
    expected = [1.0 + sum(survival[0][:length]) for length in range(len(survival[0]) + 1)]
    return [max(range(len(expected)), key=lambda length: expected[length] / seconds(1 + length))]


def chance_of_the_first_token(search):
    """Exact: the paper's two-token example, in which the second confidence depends on the first drafted token."""
    total = 0.0
    for token, drawn in enumerate(DRAFT.tolist()):
        first = 0.8
        (length,) = search([[first, first * (0.9 if token == 0 else 0.0)]], lambda tokens: 1.0 / SPEED[tokens - 1])
        if length == 0:
            total += drawn * TARGET[0].item()
            continue
        kept = min(1.0, (TARGET[token] / DRAFT[token]).item())
        residual = (TARGET - DRAFT).clamp(min=0)
        residual /= residual.sum()
        total += drawn * (kept * (token == 0) + (1 - kept) * residual[0].item())
    return total


def test_stopping_at_the_first_drop_is_lossless():
    assert chance_of_the_first_token(admitted_lengths) == pytest.approx(0.7)
    assert chance_of_the_first_token(beyond_the_drop) == pytest.approx(0.85)


def test_best_length_where_costs_rise_evenly():
    for padded in (False, True):
        assert admitted_lengths([[0.9, 0.8, 0.7, 0.1, 0.1]], linear, padded) == [3]
        assert admitted_lengths([[0.1, 0.05]], linear, padded) == [0]
        assert admitted_lengths([[]], linear, padded) == [0]
        assert admitted_lengths([[1.0] * 5], lambda tokens: 1.0, padded) == [5]


def test_the_most_likely_tokens_of_all_rows_come_first():
    assert admitted_lengths([[0.9, 0.8, 0.1], [0.2, 0.1], [0.7, 0.6]], linear) == [2, 0, 2]


def test_rows_share_the_price_of_the_longest():
    """What a short row adds within the longest row's width costs nothing; the scheduler takes it."""
    assert admitted_lengths([[0.9, 0.8, 0.1], [0.3, 0.2, 0.1], []], linear, padded=True) == [2, 2, 0]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_admission_never_depends_on_the_token_admitted(seed, padded):
    """Chances from place j + 1 on, which depend on the token at j, never change whether j is admitted; in any row."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.rand(16, generator=generator).mul(0.5).cumsum(0).tolist()
    cost = lambda tokens: 1.0 + steps[tokens]  # noqa: E731
    chances = torch.rand(3, 4, generator=generator).clamp(0.3).cumprod(1)
    for row in range(3):
        for place in range(4):
            lengths = []
            for _ in range(8):
                other = chances.clone()
                rates = torch.rand(3 - place, generator=generator)
                other[row, place + 1 :] = other[row, place] * rates.cumprod(0)
                lengths.append(admitted_lengths(other.tolist(), cost, padded)[row] > place)
            assert len(set(lengths)) == 1


def test_rates_of_acceptance():
    rates = AcceptanceRates()
    assert rates.survival(2) == [0.5, 0.25]
    for _ in range(98):
        rates.learn(Round(2, 1, 2))
    assert rates.survival(3) == pytest.approx([0.99, 0.99 * 0.01, 0.99 * 0.01 * 0.5])


# -- automatic off ----------------------------------------------------------------------------------------------------


def run(switch, rounds, gained, cost):
    """Cost of so many tokens in plain steps, and rounds that drafted."""
    total, tokens, drafted = 0.0, 0.0, 0
    while tokens < rounds:
        off = switch.off
        total, tokens, drafted = total + (1.0 if off else cost), tokens + (1.0 if off else gained), drafted + (not off)
        switch.learn(1.0 if off else gained, cost)
    return total / tokens, drafted


def test_what_loses_is_switched_off():
    for cost, tokens in ((1.4, 256), (2.0, 256), (1.4, 1000), (5.0, 1000)):
        share, drafted = run(AutomaticOff(), tokens, 1.0, cost)
        assert share < 1.05 and 3 <= drafted < 20, (cost, tokens, share)


def test_what_gains_is_left_on():
    switch = AutomaticOff()
    generator = torch.Generator().manual_seed(0)
    drafted = 0
    for gained in (1 + torch.poisson(torch.full((400,), 1.0), generator=generator)).tolist():
        drafted += not switch.off
        switch.learn(gained, 1.4)
    assert drafted > 380


def test_it_comes_back_when_the_text_changes():
    switch = AutomaticOff()
    run(switch, 300, 1.0, 1.5)
    share, drafted = run(switch, 1500, 2.5, 1.5)
    assert drafted > 300 and share < 0.8


def test_a_batch_that_loses_is_switched_off_sooner():
    _, one = run(AutomaticOff(), 100, 1.0, 1.3)
    _, eight = run(AutomaticOff(8), 100, 1.0, 1.3)
    assert eight < one


def test_evenness_is_what_the_slowest_row_leaves():
    """Against the batch decoded to its end: rows of fixed paces, a round's price by the rows that are left."""
    for gains, price in (
        ([3.0, 1.0], lambda rows: 1.0),
        ([3.0, 1.0, 2.0], lambda rows: 1.0 + rows),
        ([2.0, 2.0], lambda rows: 1.0),
        ([4.0], lambda rows: float(rows)),
    ):
        paces = RowPaces(len(gains))
        for _ in range(500):  # what each row was believed to gain at first counts no longer
            paces.FADES = 1.0
            paces.learn(dict(enumerate(gains)))
        tokens, spent, ends = 6000.0, 0.0, sorted(6000.0 / gain for gain in gains)
        for left, (begin, end) in zip(range(len(gains), 0, -1), zip([0.0, *ends], ends, strict=False), strict=True):
            spent += (end - begin) * price(left)
        mean = sum(gains) / len(gains)
        evenness = paces.evenness(list(range(len(gains))), price)
        assert evenness * mean == pytest.approx(tokens * price(len(gains)) / spent, rel=0.02)


def test_evenness_needs_more_than_a_round_and_counts_present_rows():
    paces = RowPaces(3)
    paces.learn({0: 5, 1: 1, 2: 3})
    first = paces.evenness([0, 1, 2], lambda rows: 1.0)
    for _ in range(10):
        paces.learn({0: 5, 1: 1, 2: 3})
    assert paces.evenness([0, 1, 2], lambda rows: 1.0) < first < 1.0
    assert paces.evenness([1], lambda rows: 1.0) == 1.0
    for _ in range(30):
        paces.learn({0: 2, 1: 2})
    assert paces.evenness([0, 1], lambda rows: 1.0) > 0.95
