"""The pace of a call: costs decide through generate(), and the text stays the target's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from specdec_hf import SpeculativeConfig, drafters, last_speculation, pace
from specdec_hf.costs import CostTable
from specdec_hf.drafters.dspark import DSparkDrafter
from specdec_hf.output import SpeculationStats

sys.path.insert(0, str(Path(__file__).parent / "contract"))
import harness
from test_distribution import CASES, PASSES, PROMPT, exact_joint, fit, options_of, random_head, sample, small_target

STRATEGIES = list(harness.STRATEGIES)


def priced(monkeypatch, step, token, draft):
    """Fake costs: seconds of a forward, of each further token in it, and of drafting."""
    table = CostTable([1, 101], [step, step + 100 * token])
    monkeypatch.setattr(pace, "cost_table", lambda *args: table)

    class Always(dict):
        def get(self, name, default=None):
            return draft

        def __contains__(self, name):
            return True

    table.drafts = Always()


def texts(strategy, agreement="sometimes", rows=1, new=60, **settings):
    target = harness.target("llama", seed=3)
    inputs = harness.padded_prompt(rows) if rows > 1 else {"input_ids": harness.prompt()}
    head = harness.shared_assistant(strategy, target, agreement)
    kwargs = {**inputs, "max_new_tokens": new, "do_sample": False}
    plain = target.generate(**kwargs)
    if hasattr(head, "teach"):
        head.teach(plain, harness._positions(inputs, plain))
    result = target.generate(**kwargs, assistant_model=head, **settings)
    assert result.tolist() == plain.tolist()
    return last_speculation(target)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_costs_that_lose_end_drafting(strategy, monkeypatch):
    priced(monkeypatch, 1.0, 0.0, 3.0)
    config = SpeculativeConfig(strategy=strategy, automatic_off=True)
    stats = texts(strategy, "never", new=90, speculative=config)
    assert stats.paused_rounds > 60
    assert stats.summary()["paused_rounds"] == stats.paused_rounds


def test_costs_that_gain_leave_it_on(monkeypatch):
    priced(monkeypatch, 1.0, 0.0, 0.1)
    for schedule in ("constant", "throughput"):
        config = SpeculativeConfig(automatic_off=True, num_assistant_tokens_schedule=schedule)
        stats = texts("dspark", "always", new=90, speculative=config)
        assert stats.paused_rounds == 0 and stats.mean_accepted_length > 1.5


def test_a_batch_is_judged_by_its_slowest_row(monkeypatch):
    """A round costs 1.6 plain steps: worth it if all rows gain 2 tokens, but not if some gain 3 and one gains 1."""
    for gains, pauses in (([2, 2, 2, 2], False), ([3, 3, 1, 1], True), ([2, 3, 2, 1], True)):
        drafted = drafting_rounds(monkeypatch, gains, 60)
        assert (len(drafted) < 40) == pauses and (len(drafted) == 60) != pauses


def test_a_large_batch_is_judged_sooner(monkeypatch):
    """Sixteen rows that gain nothing say in a round what one row says in four."""
    first_pauses = [drafting_rounds(monkeypatch, [1] * rows, 16) for rows in (1, 16)]
    assert first_pauses == [[0, 1, 2, 3], [0]]


def drafting_rounds(monkeypatch, gains, rounds):
    """Which rounds draft, of a call whose rows always gain so much where they cost 1.6 plain steps."""
    priced(monkeypatch, 1.0, 0.0, 0.6)
    target, rows, drafting = harness.target("llama", seed=3), len(gains), []
    head = harness.shared_assistant("dspark", target, "never")
    config = SpeculativeConfig(strategy="dspark", automatic_off=True)
    drafter, stats = DSparkDrafter.create(head, target, config), SpeculationStats.of_rows("dspark", rows)
    decider = pace.Pace(config, drafter, target, rows, stats)
    decider.prefilled()
    for number in range(rounds):
        (drafted, *_) = decider.limits(list(range(rows)), [50] * rows, [False] * rows)
        decider.end_round(rows, drafted, drafted, dict(enumerate(gains if drafted else [1] * rows)))
        drafting += [number] if drafted else []
    assert stats.paused_rounds == rounds - len(drafting)
    return drafting


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_throughput_is_greedy_exact(strategy, rows, monkeypatch):
    priced(monkeypatch, 1.0, 0.25, 0.2)
    stats = texts(strategy, "sometimes", rows, num_assistant_tokens_schedule="throughput")
    assert stats.rounds > 0


def test_dear_tokens_are_not_verified(monkeypatch):
    """With tokens for nothing all are verified; with tokens as dear as steps, none but the sure ones."""
    verified = {}
    for token in (0.0, 0.4, 5.0):
        priced(monkeypatch, 1.0, token, 0.1)
        config = SpeculativeConfig(num_assistant_tokens_schedule="throughput", automatic_off=False)
        verified[token] = texts("dspark", "always", speculative=config).drafted
    assert verified[0.0] > verified[0.4] > verified[5.0] == 0


def test_lengths_follow_the_confidence(monkeypatch):
    """A head whose confidence varies: so do the lengths, from round to round."""
    priced(monkeypatch, 1.0, 0.2, 0.1)
    target, head = small_target(), random_head(small_target())
    config = SpeculativeConfig(strategy="dspark", num_assistant_tokens_schedule="throughput", automatic_off=False)
    sample(target, head, 1, 1, max_new_tokens=60, speculative=config)
    lengths = {length for row in last_speculation(target).proposal_lengths for length in row}
    assert len(lengths) > 2


@pytest.mark.parametrize("strategy", ["dspark"])
@pytest.mark.parametrize("case", ["plain", "combined"])
def test_sampling_is_exact(strategy, case, monkeypatch):
    priced(monkeypatch, 1.0, 1e-4, 0.1)
    target = small_target()
    config = SpeculativeConfig(strategy=strategy, num_assistant_tokens_schedule="throughput")
    tokens = sample(target, random_head(target), speculative=config, **options_of(case))
    assert fit(tokens, exact_joint(target, PROMPT, CASES[case][1])) > PASSES


def test_a_search_beyond_the_drop_is_found(monkeypatch):
    """A batch of one whose chances to come decide about tokens that are drawn: the distribution test sees it."""

    def search(survival, seconds, padded):
        # Verify the block if its end is likely: what the first tokens are decides about them.
        return [len(own) if own and own[-1] > 0.05 else 0 for own in survival]

    priced(monkeypatch, 1.0, 0.0, 0.0)
    monkeypatch.setattr(pace, "admitted_lengths", search)
    target = small_target()
    config = SpeculativeConfig(strategy="dspark", num_assistant_tokens_schedule="throughput", automatic_off=False)
    tokens = sample(target, random_head(target, bias=4.0), speculative=config)
    assert fit(tokens, exact_joint(target, PROMPT, [])) < 1e-6


def test_confidence_schedule_cuts_at_its_default():
    target, head = small_target(), random_head(small_target())
    lengths = []
    for options in ({"num_assistant_tokens_schedule": "confidence"}, {"assistant_confidence_threshold": 0.4}, {}):
        torch.manual_seed(0)
        target.generate(torch.tensor([PROMPT]), assistant_model=head, do_sample=True, max_new_tokens=40, **options)
        lengths.append(last_speculation(target).proposal_lengths)
    assert lengths[0] == lengths[1] != lengths[2]


@pytest.mark.parametrize(("strategy", "rest"), [("dspark", 1.0), ("early_exit", 0.5)])
def test_a_draft_is_priced_by_the_targets_clock(strategy, rest, monkeypatch):
    """A draft that takes 0.3 of its round's target costs so much in the table, however busy the machine is now."""
    target = harness.target("llama", seed=3)
    head = harness.shared_assistant(strategy, target, "never")
    config = SpeculativeConfig(strategy=strategy, automatic_off=True, num_assistant_tokens=3)
    for load in (1.0, 7.0):
        table = CostTable([1, 101], [2.0, 102.0])
        monkeypatch.setattr(pace, "cost_table", lambda *args, table=table: table)
        drafter, stats = drafters.resolve(config, head, target), SpeculationStats.of_rows(strategy, 1)
        stats.seconds.update(draft=9.0, target=4.0)  # before the first round
        decider = pace.Pace(config, drafter, target, 1, stats)
        decider.prefilled()
        for _ in range(4):
            stats.seconds["draft"] += 0.3 * load
            stats.seconds["target"] += 1.0 * load
            decider.end_round(1, 3, 3, {0: 2})
        assert list(table.drafts.values()) == [pytest.approx(0.3 * rest * 5.0)]  # four tokens cost 5
        assert decider._seconds(4) == pytest.approx(1.3 * rest * 5.0)


def test_draft_times_are_learned_once(monkeypatch):
    table = CostTable([1, 2], [1e-3, 1e-3])
    monkeypatch.setattr(pace, "cost_table", lambda *args: table)
    texts("dspark", "always", num_assistant_tokens_schedule="throughput")
    (seconds,) = table.drafts.values()
    assert seconds > 0
    texts("dspark", "always", num_assistant_tokens_schedule="throughput")
    assert list(table.drafts.values()) == [seconds]
