"""Greedy decoding in float32 gives plain generate()'s token ids, whatever is combined with whatever."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from harness import (
    AGREEMENTS,
    FAMILIES,
    STRATEGIES,
    VOCAB,
    Favour,
    RowStop,
    acceptable,
    compare,
    padded_prompt,
    prompt,
    sequences_of,
    target,
)
from transformers import DynamicCache, LogitsProcessorList, StaticCache, StoppingCriteriaList

CASES = 320
NAMES = list(FAMILIES)
STATIC = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3")
CACHES = ("default", "default", "dynamic", "dynamic_config", "static", "static_object", "kept")
PROCESSORS = (
    "none",
    "none",
    "repetition",
    "ngram",
    "min_new_tokens",
    "min_length",
    "bad_words",
    "forced_eos",
    "suppress",
    "begin_suppress",
    "bias",
    "decay",
    "encoder_repetition",
    "prefix_fn",
    "own",
    "several",
)
STOPS = ("none", "eos", "eos_list", "criterion", "max_time", "max_length")


def make_case(index: int) -> dict[str, Any]:
    """Case ``index``: families and agreements in turn, the rest drawn with a fixed seed."""
    draw = random.Random(1000 + index)
    family = NAMES[index % len(NAMES)]
    batch = draw.choice((1, 1, 1, 2, 5))
    return {
        "family": family,
        "seed": index,
        "batch": batch,
        "attention": draw.choice(("sdpa", "sdpa", "eager")),
        "padding": draw.choice(("none", "left", "holes")),
        "cache": draw.choice(CACHES if family in STATIC else CACHES[:4] + CACHES[-1:]),
        "processors": draw.choice(PROCESSORS),
        "stop": draw.choice(STOPS),
        "budget": draw.choice((1, 2, 3, 9, 12, 12, 12)),
        "tokens": draw.choice((None, None, 1, 2, 3, 4)),
        "threshold": draw.choice((None, None, 0.0, 0.5, 1.0)),
        "top_k": draw.choice((None, None, 1, 5)),
        "agreement": AGREEMENTS[index // len(NAMES) % 3],
    }


def processor_kwargs(name: str, length: int, budget: int, eos: int) -> dict[str, Any]:
    return {
        "none": {},
        "repetition": {"repetition_penalty": 1.3},
        "ngram": {"no_repeat_ngram_size": 2},
        "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": list(range(3, 40))},
        "min_length": {"min_length": length + 4, "eos_token_id": list(range(3, 40))},
        "bad_words": {"bad_words_ids": [[token] for token in range(3, 30)] + [[40, 41], [50, 51, 52]]},
        "forced_eos": {"forced_eos_token_id": eos},
        "suppress": {"suppress_tokens": list(range(20, 60))},
        "begin_suppress": {"begin_suppress_tokens": list(range(20, 90))},
        "bias": {"sequence_bias": [[[5], 6.0], [[7, 8], 9.0], [[30], -8.0]]},
        "decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": eos},
        "encoder_repetition": {"encoder_repetition_penalty": 1.5},
        "prefix_fn": {
            "prefix_allowed_tokens_fn": lambda row, ids: [3 + (int(ids[-1]) * 7 + k + row) % 90 for k in range(9)]
        },
        "own": {"logits_processor": LogitsProcessorList([Favour()])},
        "several": {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "suppress_tokens": [4, 5],
            "min_new_tokens": 3,
            "renormalize_logits": True,
            "eos_token_id": [9, 19, 29],
        },
    }[name]


def cache_kwargs(name: str, model: Any, batch: int, length: int) -> dict[str, Any]:
    return {
        "default": dict,
        "dynamic": lambda: {"past_key_values": DynamicCache()},
        "dynamic_config": lambda: {"past_key_values": DynamicCache(config=model.config)},
        "static": lambda: {"cache_implementation": "static"},
        "static_object": lambda: {"past_key_values": StaticCache(config=model.config, max_cache_len=length)},
        "kept": lambda: {"return_dict_in_generate": True},
    }[name]()


def stop_kwargs(name: str, length: int, budget: int, ids: list[int]) -> dict[str, Any]:
    return {
        "none": {},
        "eos": {"eos_token_id": ids[0]},
        "eos_list": {"eos_token_id": ids},
        "criterion": {"stopping_criteria": StoppingCriteriaList([RowStop(ids)])},
        "max_time": {"max_time": 600.0},
        "max_length": {"max_length": length + budget},
    }[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("index", "strategy"),
    # All cases for one strategy; every fifth, which still meets each family, for those that share its loop.
    [(index, name) for name in STRATEGIES for index in range(CASES) if name == "dspark" or index % 5 == 0],
)
def test_tokens_equal_plain_generate(index: int, strategy: str) -> None:
    case = make_case(index)
    model = target(case["family"], case["attention"], seed=index % 3)
    batch, budget = case["batch"], case["budget"]
    length = 7 + index % 6
    inputs = {"input_ids": prompt(batch, length, index)}
    if case["padding"] != "none" and batch > 1:
        inputs = padded_prompt(batch, length, index, holes=case["padding"] == "holes")
    ids = random.Random(index).sample(range(3, VOCAB), 12)

    def call() -> dict[str, Any]:
        kwargs = {
            **inputs,
            **cache_kwargs(case["cache"], model, batch, length + budget),
            **stop_kwargs(case["stop"], length, budget, ids),
            **processor_kwargs(case["processors"], length, budget, ids[0]),
        }
        return kwargs if "max_length" in kwargs else {**kwargs, "max_new_tokens": budget}

    outcome = compare(
        model,
        call,
        strategy,
        case["agreement"],
        expect_rounds=False,
        num_assistant_tokens=case["tokens"],
        assistant_confidence_threshold=case["threshold"],
        draft_top_k=case["top_k"],
    )
    TALLY[case["agreement"]].append(outcome.stats)
    stats, steps = outcome.stats, sequences_of(outcome.plain).shape[1] - length
    assert stats.fallback is None
    if steps > 3 and not case["threshold"]:
        assert stats.drafted > 0
        assert stats.accepted > 0 or case["agreement"] != "always" or batch > 1


TALLY: dict[str, list[Any]] = {agreement: [] for agreement in AGREEMENTS}


def test_the_cases_speculated() -> None:
    """The cases above prove something only if blocks were drafted, accepted and rejected."""
    if sum(map(len, TALLY.values())) < CASES:
        pytest.skip("judges the cases above; they ran elsewhere or were selected from")
    figures = {name: (sum(map(acceptable, all_)), sum(s.accepted for s in all_)) for name, all_ in TALLY.items()}
    assert all(stats.fallback is None for all_ in TALLY.values() for stats in all_)
    assert all(drafted > 500 for drafted, _ in figures.values()), figures
    # What is drafted beyond a stop, or beyond the shortest row where rows stay level, counts against the head.
    assert figures["always"][1] > 0.5 * figures["always"][0], figures
    assert 0.2 < figures["sometimes"][1] / figures["sometimes"][0] < 0.8, figures
    assert figures["never"][1] < 0.05 * figures["never"][0], figures


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_far_beyond_its_window(family: str, attention: str, strategy: str) -> None:
    model = target(family, attention, seed=7)
    inputs = padded_prompt(3, 12, seed=4)
    outcome = compare(model, lambda: {**inputs, "max_new_tokens": 26}, strategy, "sometimes")
    assert 0 < outcome.stats.accepted < acceptable(outcome.stats)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_blocks_are_accepted_from_a_head_that_agrees(strategy: str) -> None:
    model = target()
    outcome = compare(model, lambda: {"input_ids": prompt(), "max_new_tokens": 21}, strategy, "always")
    assert outcome.stats.accepted == acceptable(outcome.stats) == 16
    assert outcome.stats.accepted_lengths == [[5, 5, 5, 5]]
    assert outcome.stats.acceptance_by_position == [1.0] * 4
    outcome = compare(model, lambda: {"input_ids": prompt(), "max_new_tokens": 21}, strategy, "never")
    assert outcome.stats.accepted == 0
    assert outcome.stats.accepted_lengths == [[1] * 20]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_does_as_it_does_alone(strategy: str) -> None:
    model, inputs = target("qwen3"), padded_prompt(5, 11, seed=2)
    together = compare(model, lambda: {**inputs, "max_new_tokens": 14, "eos_token_id": [5, 6, 7, 8, 9]}, strategy)
    for row in range(5):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        single = compare(model, lambda a=alone: {**a, "max_new_tokens": 14, "eos_token_id": [5, 6, 7, 8, 9]}, strategy)
        tokens = single.speculative[0].tolist()
        assert together.speculative[row].tolist()[: len(tokens)] == tokens


def test_cases_are_many_and_differ() -> None:
    cases = [make_case(index) for index in range(CASES)]
    assert len(cases) >= 300
    assert len({tuple(case.items()) for case in cases}) == CASES
    for name, values in (("family", NAMES), ("processors", PROCESSORS), ("stop", STOPS), ("cache", CACHES)):
        assert {case[name] for case in cases} == set(values)
    assert torch.equal(prompt(2, 7, 3), prompt(2, 7, 3))
