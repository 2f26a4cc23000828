"""Statistics: what counts as what; outputs that blocks yield laid out as plain decoding lays them out."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import torch

from specdec_hf.output import SpeculationStats, StepOutputs, Stopwatch
from specdec_hf.proposal import Round


def test_counting():
    stats = SpeculationStats("dspark", *([[], []] for _ in range(3)))
    assert stats.rounds == stats.drafted == stats.accepted == 0
    assert stats.mean_accepted_length == 0.0 and stats.acceptance_by_position == []
    for row, proposed, accepted in ((0, 4, 4), (0, 4, 1), (1, 2, 0), (1, 0, 0)):
        stats.record(row, Round(proposed, accepted, accepted + 1))
    assert stats.rounds == 4
    assert stats.drafted == 10 and stats.accepted == 5, "the bonus token is no drafted token"
    assert stats.accepted_lengths == [[5, 2], [1, 1]] and stats.proposal_lengths == [[4, 4], [2, 0]]
    assert stats.mean_accepted_length == 9 / 4, "the bonus token counts"
    # A place counts only in rounds that drafted so far: three at 1 and 2, two at 3 and 4.
    assert stats.acceptance_by_position == [2 / 3, 1 / 3, 1 / 2, 1 / 2]
    summary = json.loads(json.dumps(stats.summary()))
    assert summary["drafted"] == 10 and set(summary["seconds"]) >= {"draft", "target", "other"}


def test_stopwatch_accounts_for_all_time():
    stats = SpeculationStats("dspark")
    start = time.perf_counter()
    watch = Stopwatch(stats)
    with watch.part("draft"):
        time.sleep(0.01)
    time.sleep(0.01)
    watch.stop()
    assert stats.seconds["draft"] >= 0.01 and stats.seconds["other"] >= 0.009
    assert sum(stats.seconds.values()) <= time.perf_counter() - start


def test_rows_that_ended_early_hold_zeros():
    outputs = StepOutputs(2, {"scores"}, [])
    first, second = torch.full((2, 1, 3), 1.0), torch.full((1, 2, 3), 2.0)
    for row in range(2):
        outputs.add(row, row, 0, first, first)
    for place in range(2):
        outputs.add(1, 0, place, second, second)  # row 0 has left: row 1 stands at place 0 of the batch
    result = outputs.result("scores")
    assert [step.tolist() for step in result] == [[[1.0] * 3] * 2, [[0.0] * 3, [2.0] * 3], [[0.0] * 3, [2.0] * 3]]
    assert outputs.result("logits") is None


def test_states_are_cut_to_one_token_each():
    """Attention maps end at the token's own slot, and start where a sliding window does."""
    outputs = StepOutputs(1, {"hidden_states", "attentions"}, [None, 3])
    outputs.prefill(SimpleNamespace(hidden_states=("prompt",), attentions=("a", "b")))
    maps = torch.arange(8.0).expand(1, 1, 2, 8)  # a block of 2 behind 6 slots
    windowed = torch.arange(4.0, 8.0).expand(1, 1, 2, 4)
    block = SimpleNamespace(hidden_states=(torch.arange(2.0)[None, :, None],), attentions=(maps, windowed))
    for place in range(2):
        outputs.add_states(0, 0, place, block, 6 + place, 8)
    states, attentions = outputs.result("hidden_states"), outputs.result("attentions")
    assert states[0] == ("prompt",) and [step[0].item() for step in states[1:]] == [0.0, 1.0]
    assert attentions[1][0].shape == (1, 1, 1, 7) and attentions[2][0].shape == (1, 1, 1, 8)
    assert attentions[1][1].flatten().tolist() == [4, 5, 6] and attentions[2][1].flatten().tolist() == [5, 6, 7]
