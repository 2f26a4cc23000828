"""Sampling: seeds, generators, rows that do not depend on their neighbours, and what is kept as the draft's q."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from specdec_hf import DSparkConfig, DSparkDraftModel, enable_speculation
from specdec_hf.drafters.dspark import DSparkDrafter
from specdec_hf.generation import last_speculation
from specdec_hf.processors import DraftSampler

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import make_target

PAD = 0
PROMPTS = [[5, 9, 4, 7, 11, 3], [8, 6], [12, 3, 3, 9]]
OPTIONS: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "top_k": 0, "temperature": 1.1, "top_p": 0.95}


def pair(dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> tuple[Any, DSparkDraftModel]:
    sizes = {"vocab_size": 24, "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 16, "spread": 1.5}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": None}
    target = enable_speculation(make_target(seed=seed, **{**sizes, **heads, **overrides}))
    torch.manual_seed(1)
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, block_size=4, markov_rank=4, target_layer_ids=[0]))
    return target, head.eval().to(dtype)


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
    }


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def new_tokens(target: Any, head: Any, prompts: list[list[int]], **kwargs: Any) -> Tensor:
    inputs = padded(prompts)
    return target.generate(**inputs, assistant_model=head, **{**OPTIONS, **kwargs})[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one row", "batch"])
def test_the_global_seed_decides(prompts):
    target, head = pair()
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(new_tokens(target, head, prompts))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("many", [False, True], ids=["one generator", "a list"])
def test_generator_leaves_the_global_stream_alone(many):
    target, head = pair()

    def run(seed: int) -> Tensor:
        own = seeded(seed, seed + 100, seed + 200) if many else seeded(seed)[0]
        return new_tokens(target, head, PROMPTS, generator=own)

    torch.manual_seed(9)
    before = torch.get_rng_state()
    first = run(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)  # the global stream does not matter
    assert torch.equal(run(1), first) and not torch.equal(run(2), first)


def test_one_generator_moves_on():
    target, head = pair()
    one = seeded(5)[0]
    first, second = (new_tokens(target, head, PROMPTS[:1], generator=one) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "processors", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [PAD]}]
)
@pytest.mark.parametrize("limits", [{}, {"num_assistant_tokens": 2}, {"assistant_confidence_threshold": 0.5}])
def test_rows_equal_their_single_runs(processors, limits):
    """Left-padded rows of several lengths, each with its own generator: text and rounds as if alone.

    Padding is suppressed with processors that look at the prefix, since they take it for text in plain decoding too.
    """
    target, head = pair()
    with torch.no_grad():
        head.confidence_head.proj.weight.normal_(0.0, 0.7)
    together = new_tokens(target, head, PROMPTS, generator=seeded(1, 2, 3), **processors, **limits)
    rounds = last_speculation(target).accepted_lengths
    assert len({tuple(row) for row in rounds}) > 1, "rows that accept alike show nothing"
    for row, seed in enumerate((1, 2, 3)):
        alone = new_tokens(target, head, [PROMPTS[row]], generator=seeded(seed), **processors, **limits)
        assert torch.equal(alone[0], together[row])
        assert last_speculation(target).accepted_lengths == [rounds[row]]


def test_a_row_does_not_depend_on_its_neighbours():
    target, head = pair()
    first = new_tokens(target, head, PROMPTS, generator=seeded(1, 2, 3))
    others = new_tokens(target, head, [PROMPTS[2], PROMPTS[1], [7] * 6, [4, 4]], generator=seeded(9, 2, 7, 6))
    assert torch.equal(first[1], others[1])


def test_rows_that_end_early_do_not_shift_the_others():
    """The end-of-sequence id comes from a first run, so some rows stop at once and leave the batch."""
    target, head = pair()
    free = new_tokens(target, head, PROMPTS, generator=seeded(1, 2, 3))
    stop = int(free[1, 2])
    ended = new_tokens(target, head, PROMPTS, generator=seeded(1, 2, 3), eos_token_id=stop, pad_token_id=PAD)
    for row in range(3):
        kept = free[row].tolist()
        kept = kept[: kept.index(stop) + 1] if stop in kept else kept
        assert ended[row, : len(kept)].tolist() == kept and not ended[row, len(kept) :].any()
    assert ended[1].tolist().index(stop) <= 2


def test_return_sequences_take_a_generator_each():
    target, head = pair()
    tokens = new_tokens(target, head, PROMPTS[:1], num_return_sequences=3, generator=seeded(4, 5, 4))
    assert torch.equal(tokens[0], tokens[2]) and not torch.equal(tokens[0], tokens[1])
    with pytest.raises(ValueError, match=r"1 entries for 3 rows.*num_return_sequences"):
        new_tokens(target, head, PROMPTS[:1], num_return_sequences=3, generator=seeded(4))


# -- float32 once, before both drawing and the ratio ------------------------------------------------------------------


class Recorder(LogitsProcessor):
    def __init__(self, pure: bool) -> None:
        self.pure_function_of_prefix = pure
        self.dtypes: set[torch.dtype] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.dtypes.add(scores.dtype)
        return scores


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("do_sample", [True, False])
def test_processors_see_float32(pure, do_sample):
    target, head = pair(torch.bfloat16)
    target.to(torch.bfloat16)
    recorder = Recorder(pure)
    new_tokens(target, head, PROMPTS, logits_processor=[recorder], do_sample=do_sample)
    assert recorder.dtypes == {torch.float32}


def test_kept_probabilities_are_those_that_were_drawn_from(monkeypatch):
    """A bf16 head under a float32 target: q is float32, sums to one, and tokens come with exactly its frequencies."""
    target, head = pair(torch.bfloat16)
    proposals: list[Any] = []
    raw: list[Tensor] = []
    propose, sample = DSparkDrafter.propose, DraftSampler.sample

    def recorded(self: Any, request: Any) -> Any:
        proposals.append(propose(self, request))
        return proposals[-1]

    def seen(self: Any, logits: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        raw.append(logits)
        return sample(self, logits, vocabulary)

    monkeypatch.setattr(DSparkDrafter, "propose", recorded)
    monkeypatch.setattr(DraftSampler, "sample", seen)
    rows = 4000
    target.generate(
        torch.tensor([PROMPTS[0]]).expand(rows, -1), assistant_model=head, do_sample=True, top_k=0, max_new_tokens=3,
        generator=seeded(0)[0],
    )  # fmt: skip
    first = proposals[0]  # one token a row: budget 3 = prompt's + drafted + bonus
    assert first.probs.dtype == first.token_probs.dtype == torch.float32
    torch.testing.assert_close(first.probs.sum(-1), torch.ones(rows, 1), atol=1e-5, rtol=0)
    assert torch.equal(first.probs[:, 0], raw[0].float().softmax(-1)), "float32 before the softmax"
    assert torch.equal(first.token_probs, first.probs.gather(2, first.tokens[:, :, None]).squeeze(2))
    expected = first.probs[:, 0].double().sum(0)
    counts = torch.bincount(first.tokens[:, 0], minlength=24).double()
    spread = (first.probs[:, 0].double() * (1 - first.probs[:, 0].double())).sum(0).sqrt()
    assert ((counts - expected).abs() < 4.5 * spread + 1).all()
