"""``return_dict_in_generate`` gives plain generate()'s class, tuple lengths, shapes and values, and the statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import (
    STRATEGIES,
    Favour,
    acceptable,
    check_stats,
    compare,
    padded_prompt,
    prompt,
    shared_assistant,
    target,
)
from torch import Tensor
from transformers import LogitsProcessorList

from specdec_hf import SpeculationStats, enable_speculation, last_speculation

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
#: (family, further arguments): sliding windows, and the way of decoding in which rows stay level
SETTINGS = {
    "llama": {},
    "gemma3_text": {},
    "mistral": {"repetition_penalty": 1.2},
    "qwen3": {"logits_processor": LogitsProcessorList([Favour()])},
    "bloom": {},
    "gpt2": {"prefill_chunk_size": 4},
}


def ends(plain: Any, width: int, eos: list[int]) -> list[int]:
    """Per row, how many steps belong to its text."""
    rows = plain.sequences[:, width:].tolist()
    return [next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in rows]


def assert_same_states(plain: Any, ours: Any, steps: list[int]) -> None:
    """Nested tuples by step and layer: equal lengths and shapes, and close values where a row still runs."""
    assert len(plain) == len(ours)
    for step, (expected, got) in enumerate(zip(plain, ours, strict=True)):
        layers = [(expected, got)] if isinstance(expected, Tensor) else list(zip(expected, got, strict=True))
        for a, b in layers:
            assert a.shape == b.shape, (step, a.shape, b.shape)
            assert a.dtype == b.dtype
            running = [row for row, end in enumerate(steps) if step < end]
            torch.testing.assert_close(b[running], a[running], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("agreement", ["always", "sometimes"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", SETTINGS)
def test_same_class_lengths_shapes_and_values(strategy: str, family: str, batch: int, agreement: str) -> None:
    model, inputs = target(family, "eager", seed=1), padded_prompt(batch, 10)
    new = model.generate(**inputs, do_sample=False, max_new_tokens=12)[:, 10:]
    eos = [int(row[5 + 2 * i]) for i, row in enumerate(new)]
    kwargs = {**inputs, **EVERYTHING, **SETTINGS[family], "max_new_tokens": 13, "eos_token_id": eos}
    outcome = compare(model, lambda: dict(kwargs), strategy, agreement)
    plain, ours = outcome.plain, outcome.speculative
    assert type(ours) is type(plain)
    assert set(plain.keys()) == set(ours.keys())
    steps = ends(plain, 10, eos)
    for name in ("scores", "logits", "hidden_states"):
        assert_same_states(plain[name], ours[name], steps)
    if "prefill_chunk_size" not in kwargs:
        assert_same_states(plain["attentions"], ours["attentions"], steps)
    scores = model.compute_transition_scores(ours.sequences, ours.scores)
    expected = model.compute_transition_scores(plain.sequences, plain.scores)
    torch.testing.assert_close(scores[0, : steps[0]], expected[0, : steps[0]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("wanted", ["output_scores", "output_logits", "output_hidden_states", "output_attentions"])
def test_one_output_alone(strategy: str, wanted: str) -> None:
    model = target("llama", "eager")
    kwargs = {"input_ids": prompt(), "return_dict_in_generate": True, wanted: True, "max_new_tokens": 7}
    outcome = compare(model, lambda: dict(kwargs), strategy)
    assert set(outcome.plain.keys()) == set(outcome.speculative.keys())
    assert len(outcome.speculative[wanted.removeprefix("output_")]) == 7


def test_outputs_are_not_made_unless_asked_for(strategy: str) -> None:
    kwargs = {"input_ids": prompt(), "output_scores": True, "output_hidden_states": True, "max_new_tokens": 7}
    outcome = compare(target(), lambda: dict(kwargs), strategy)
    assert isinstance(outcome.speculative, Tensor)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("agreement", ["always", "sometimes", "never"])
def test_statistics_tell_what_happened(strategy: str, batch: int, agreement: str) -> None:
    model, inputs = target(seed=2), padded_prompt(batch)
    outcome = compare(
        model, lambda: {**inputs, "max_new_tokens": 16, "return_dict_in_generate": True}, strategy, agreement
    )
    stats = outcome.speculative.speculation
    assert isinstance(stats, SpeculationStats)
    assert stats is last_speculation(model)
    assert stats.strategy == strategy
    assert len(stats.accepted_lengths) == batch
    assert all(1 + sum(row) == 16 for row in stats.accepted_lengths)  # no stop: every token but the prefill's is here
    assert stats.summary()["rounds"] == stats.rounds
    share = stats.accepted / acceptable(stats)
    assert {"always": share == 1.0, "sometimes": 0.1 < share < 0.9, "never": share == 0.0}[agreement]
    assert stats.seconds["target"] > 0
    assert stats.forward_passes == max(map(len, stats.accepted_lengths))


def test_statistics_without_the_dictionary(strategy: str) -> None:
    model = target("phi3")
    result = model.generate(
        prompt(), max_new_tokens=6, do_sample=False, assistant_model=shared_assistant(strategy, model, "never")
    )
    assert isinstance(result, Tensor)
    check_stats(last_speculation(model), shared_assistant(strategy, model, "never").max_draft_tokens)
    assert last_speculation(enable_speculation(target("opt", seed=9))) is None


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_a_confidence_threshold_cuts_before_the_target_runs(strategy: str, threshold: float) -> None:
    model, widths = target(seed=5), []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: widths.append(out.shape[1]))
    try:
        outcome = compare(
            model,
            lambda: {"input_ids": prompt(), "max_new_tokens": 16},
            strategy,
            assistant_confidence_threshold=threshold,
        )
    finally:
        handle.remove()
    lengths = outcome.stats.proposal_lengths[0]
    blocks = widths[-outcome.stats.forward_passes * 2 :] if strategy == "dspark" else widths
    assert all(length + 1 in blocks for length in lengths)
    if threshold == 1.0 and strategy == "dspark":  # its random confidence head is never certain; others may be
        assert outcome.stats.drafted == 0
    if threshold == 0.0:
        assert lengths[0] == shared_assistant(strategy, model, "always").max_draft_tokens
