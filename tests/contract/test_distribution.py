"""Sampling through generate() has exactly the target's processed distribution, whatever the draft head says.

The joint distribution of three tokens is enumerated with the target's own forward and transformers' own processors at
each true prefix, and compared with samples by chi-square. The head is untrained, its Markov bias large, so target and
draft disagree often; loops that are wrong in a known way fail the same test.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process as hf

from specdec_hf import DSparkConfig, DSparkDraftModel, SpeculativeConfig, enable_speculation, processors, verify
from specdec_hf.drafters.dspark import DSparkDrafter
from specdec_hf.generation import last_speculation

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import make_target

VOCAB = 8
PROMPT = [3, 5, 1, 4]
LENGTH = 4  # enumerated tokens: the first comes from the prompt's forward, the joint is that of the other three
ROWS = 2000
SAMPLES = 8000
FAILS, PASSES = 1e-6, 1e-4  # a wrong loop must be beyond doubt, a right one (seeds are fixed) far from it


def small_target(**overrides: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "eos_token_id": None,
        "spread": 1.2,
    }
    return enable_speculation(make_target(**{**sizes, **overrides}))


def random_head(target: Any, bias: float = 1.0, **overrides: Any) -> DSparkDraftModel:
    """An untrained head. `bias` scales the Markov bias and with it the disagreement with the target."""
    fields = {"block_size": 4, "markov_rank": 4, "target_layer_ids": [0], **overrides}
    torch.manual_seed(1)
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, **fields)).eval()
    with torch.no_grad():
        for weight in (head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight):
            weight.normal_(0.0, bias**0.5)
        if head.confidence_head is not None:
            head.confidence_head.proj.weight.normal_(0.0, 1.0)
    if head.config.has_reduced_vocab:
        head.set_draft_vocabulary(torch.tensor([0, 2, 3, 5, 7]))
    return head


# -- exact distribution -----------------------------------------------------------------------------------------------


@torch.no_grad()
def exact_joint(target: Any, prompt: list[int], rules: list[Any], length: int = LENGTH) -> Tensor:
    """float64 [V] * length: probability of every continuation, by plain forwards and plain processors."""
    vocab = target.config.vocab_size
    joint = torch.ones(1, dtype=torch.float64)
    for done in range(length):
        tails = torch.tensor(list(itertools.product(range(vocab), repeat=done)), dtype=torch.long)
        ids = torch.cat((torch.tensor(prompt).expand(len(tails), -1), tails.view(len(tails), done)), dim=1)
        scores = target(ids).logits[:, -1].float()
        for rule in rules:
            scores = rule(ids, scores)
        joint = (joint[:, None] * scores.softmax(-1).double()).flatten()
    return joint.view([vocab] * length)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """p-value of counts against expected counts; cells that expect fewer than 5 are pooled."""
    counts, expected = counts.flatten().double(), expected.flatten().double()
    if (counts[expected < 1e-9 * expected.sum()] > 0).any():
        return 0.0  # something that cannot happen
    small = expected < 5
    seen = torch.cat((counts[~small], counts[small].sum()[None]))
    wanted = torch.cat((expected[~small], expected[small].sum()[None]))
    used = wanted > 1e-3
    statistic = ((seen - wanted)[used] ** 2 / wanted[used]).sum()
    freedom = max(int(used.sum()) - 1, 1)
    return torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2).item()


def fit(tokens: Tensor, joint: Tensor) -> float:
    """The smallest p-value of the joint of all tokens but the first and of each token alone (Bonferroni corrected)."""
    length, vocab = joint.dim(), joint.shape[0]
    samples = tokens[:, :length]
    places = torch.arange(length - 1, -1, -1)
    cells = torch.bincount((samples * vocab**places).sum(-1), minlength=vocab**length).view(joint.shape)
    expected = joint * len(samples)
    tests = [(cells.sum(0), expected.sum(0))]
    for place in range(length):
        others = tuple(axis for axis in range(length) if axis != place)
        tests.append((cells.sum(others), expected.sum(others)))
    return min(min(chi_square(*test) for test in tests) * len(tests), 1.0)


def sample(
    target: Any, head: Any, samples: int = SAMPLES, rows: int = ROWS, prompt: Any = PROMPT, **kwargs: Any
) -> Tensor:
    ids = torch.tensor(prompt).expand(rows, -1)
    options = {"max_new_tokens": 6, "do_sample": True, "speculative": "dspark", "assistant_model": head, **kwargs}
    calls = [target.generate(ids, **options)[:, ids.shape[1] :] for _ in range(samples // rows)]
    return torch.cat(calls)


# -- processors -------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain": ({}, []),
    "temperature": ({"temperature": 0.6}, [hf.TemperatureLogitsWarper(0.6)]),
    "top_k": ({"top_k": 3}, [hf.TopKLogitsWarper(3)]),
    "top_p": ({"top_p": 0.7}, [hf.TopPLogitsWarper(0.7)]),
    "min_p": ({"min_p": 0.3}, [hf.MinPLogitsWarper(0.3)]),
    "typical": ({"typical_p": 0.6}, [hf.TypicalLogitsWarper(0.6)]),
    "epsilon": ({"epsilon_cutoff": 0.08}, [hf.EpsilonLogitsWarper(0.08)]),
    "eta": ({"eta_cutoff": 0.2}, [hf.EtaLogitsWarper(0.2)]),
    "repetition": ({"repetition_penalty": 1.8}, [hf.RepetitionPenaltyLogitsProcessor(1.8)]),
    "no_repeat": ({"no_repeat_ngram_size": 2}, [hf.NoRepeatNGramLogitsProcessor(2)]),
    "combined": (
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "temperature": 1.3, "top_k": 6, "top_p": 0.9},
        [
            hf.RepetitionPenaltyLogitsProcessor(1.4),
            hf.NoRepeatNGramLogitsProcessor(2),
            hf.TemperatureLogitsWarper(1.3),
            hf.TopKLogitsWarper(6),
            hf.TopPLogitsWarper(0.9),
        ],
    ),
}


def options_of(case: str) -> dict[str, Any]:
    return {"top_k": 0, **CASES[case][0]}  # transformers' default is top_k = 50


@pytest.mark.parametrize("case", CASES)
def test_joint_of_a_batch(case):
    target = small_target()
    tokens = sample(target, random_head(target), **options_of(case))
    assert fit(tokens, exact_joint(target, PROMPT, CASES[case][1])) > PASSES
    assert 0.05 < last_speculation(target).acceptance_by_position[0] < 0.95, "the head must agree at times only"


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_other_markov_heads(kind):
    target = small_target()
    tokens = sample(target, random_head(target, markov_head_type=kind), **options_of("combined"))
    assert fit(tokens, exact_joint(target, PROMPT, CASES["combined"][1])) > PASSES


@pytest.mark.parametrize("case", ["top_p", "combined"])
@pytest.mark.parametrize("variant", ["reduced vocabulary", "draft_top_k", "confidence", "mask slots"])
def test_variants_of_the_draft(variant, case):
    target = small_target()
    fields: dict[str, Any] = {
        "reduced vocabulary": {"draft_vocab_size": 5},
        "mask slots": {"sample_from_anchor": False},
    }
    options = options_of(case)
    if variant == "draft_top_k":
        options["speculative"] = SpeculativeConfig(strategy="dspark", draft_top_k=3)
    if variant == "confidence":
        options["assistant_confidence_threshold"] = 0.5
    tokens = sample(target, random_head(target, **fields.get(variant, {})), **options)
    assert fit(tokens, exact_joint(target, PROMPT, CASES[case][1])) > PASSES
    if variant == "confidence":
        lengths = {length for row in last_speculation(target).proposal_lengths for length in row}
        assert {0, 1, 2} <= lengths, f"the threshold must cut at several places, not {lengths}"


@pytest.mark.parametrize("width", [1, 2, 3])
def test_draft_lengths(width):
    target = small_target()
    tokens = sample(target, random_head(target), num_assistant_tokens=width, **options_of("combined"))
    assert fit(tokens, exact_joint(target, PROMPT, CASES["combined"][1])) > PASSES
    assert max(map(max, last_speculation(target).proposal_lengths)) == width


def test_single_rows():
    """Batch 1 takes other paths (no masks, no row lengths) than a batch."""
    target = small_target(vocab_size=4)
    tokens = sample(
        target, random_head(target), samples=200, rows=1, prompt=[3, 1, 2], max_new_tokens=4, **options_of("top_p")
    )
    assert fit(tokens, exact_joint(target, [3, 1, 2], CASES["top_p"][1], length=3)) > PASSES


# -- one position at a time -------------------------------------------------------------------------------------------


class Stateful(LogitsProcessor):
    """Unknown to the package, so it is called as in plain decoding: every committed position once, in order."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        assert self.lengths == list(range(self.lengths[0], self.lengths[0] + len(self.lengths)))
        return scores - 0.7 * torch.nn.functional.one_hot(input_ids[:, -1], scores.shape[-1])


class Never(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("forced_by", ["processor", "criterion"])
def test_level_rows(forced_by):
    """All rows advance together, cut to the shortest; rows of several prompts accept different lengths."""
    target = small_target(vocab_size=4, spread=0.4)
    head = random_head(target, bias=0.05)
    prompts = [[3, 1, 2], [1, 3, 3]]
    ids = torch.tensor(prompts)
    collected, accepted = [], []
    for _ in range(250):
        extra = {"logits_processor": [Stateful()]} if forced_by == "processor" else {"stopping_criteria": [Never()]}
        options = {**extra, "top_k": 0, "max_new_tokens": 4, "do_sample": True}
        collected.append(target.generate(ids, assistant_model=head, **options)[:, 3:])
        accepted += last_speculation(target).accepted_lengths[0]
    shift = [lambda ids, scores: scores - 0.7 * torch.nn.functional.one_hot(ids[:, -1], 4)]
    for row, prompt in enumerate(prompts):
        tokens = torch.stack([call[row] for call in collected])
        joint = exact_joint(target, prompt, shift if forced_by == "processor" else [], length=3)
        assert fit(tokens, joint) > PASSES, f"prompt {prompt}"
    assert {1, 2, 3} == set(accepted), f"rows must be cut at several lengths, not {set(accepted)}"


# -- the same test fails for loops that are wrong ---------------------------------------------------------------------


def before_the_warpers(patch: pytest.MonkeyPatch) -> None:
    """The draft is drawn from processed scores, the ratio uses unprocessed ones."""
    sample_, draw_ = processors.DraftSampler.sample, processors.DraftSampler._draw

    def sample_raw(self: Any, logits: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        self.raw = logits.float().softmax(-1)
        return sample_(self, logits, vocabulary)

    def draw_raw(self: Any, scores: Tensor, place: int) -> Tensor:
        columns = draw_(self, scores, place)
        self._probs[-1] = self.raw
        self._token_probs[-1] = self.raw.gather(1, columns[:, None]).squeeze(1)
        return columns

    patch.setattr(processors.DraftSampler, "sample", sample_raw)
    patch.setattr(processors.DraftSampler, "_draw", draw_raw)


def drawn_in_bf16(patch: pytest.MonkeyPatch) -> None:
    """The draft is drawn in bf16 and the ratio taken in float32 (DeepSpec issue 31)."""

    def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
        cumulative = probs.bfloat16().cumsum(-1)
        return (cumulative <= uniforms[:, None].bfloat16() * cumulative[:, -1:]).sum(-1).clamp(max=probs.shape[-1] - 1)

    patch.setattr(processors, "draw", draw)


def ratio_in_bf16(patch: pytest.MonkeyPatch) -> None:
    """Uniform numbers and ratio of eight bits."""

    def accepts(target: Tensor, draft: Tensor, uniforms: Tensor) -> Tensor:
        return (uniforms * 256).floor().bfloat16() / 256 < target.bfloat16() / draft.bfloat16()

    patch.setattr(verify, "accepts", accepts)


def no_residual(patch: pytest.MonkeyPatch) -> None:
    """A rejected token is replaced by a draw from the target itself."""
    patch.setattr(verify, "residual", lambda target_probs, draft_probs: target_probs)


def residual_for_the_bonus(patch: pytest.MonkeyPatch) -> None:
    """The last draft distribution is subtracted even where nothing was rejected."""
    rows = verify.draft_rows
    patch.setattr(
        verify, "draft_rows", lambda p, position, rejected, v: rows(p, position, torch.ones_like(rejected), v)
    )


def greedy_draft_soft_probs(patch: pytest.MonkeyPatch) -> None:
    """The most likely token is drafted, and the softmax kept as its distribution."""

    def draw(self: Any, scores: Tensor, place: int) -> Tensor:
        probs, columns = scores.softmax(-1), scores.argmax(-1)
        self._probs.append(probs)
        self._token_probs.append(probs.gather(1, columns[:, None]).squeeze(1))
        return columns

    patch.setattr(processors.DraftSampler, "_draw", draw)


def confidence_of_the_token_itself(patch: pytest.MonkeyPatch) -> None:
    """The cut looks at the very token that it decides about."""
    propose = DSparkDrafter.propose

    def peeking(self: Any, request: Any) -> Any:
        proposal = propose(self, request)
        return replace(proposal, confidence=(proposal.tokens % 2 == 0).float())

    patch.setattr(DSparkDrafter, "propose", peeking)


WRONG = {
    before_the_warpers: options_of("combined"),
    no_residual: options_of("plain"),
    residual_for_the_bonus: {**options_of("temperature"), "num_assistant_tokens": 1},
    greedy_draft_soft_probs: options_of("plain"),
    confidence_of_the_token_itself: {**options_of("plain"), "assistant_confidence_threshold": 0.5},
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_loops_fail(wrong, monkeypatch):
    wrong(monkeypatch)
    target = small_target()
    tokens = sample(target, random_head(target), **WRONG[wrong])
    rules = CASES["combined" if wrong is before_the_warpers else "plain"][1]
    if wrong is residual_for_the_bonus:
        rules = CASES["temperature"][1]
    assert fit(tokens, exact_joint(target, PROMPT, rules)) < FAILS


def steep(rare: float, head_agrees: bool) -> tuple[Any, DSparkDraftModel]:
    """A target that says one token nearly always, and seven with probability `rare`; a head that agrees, or not."""
    target = small_target()
    logits = torch.tensor([1 - 7 * rare] + [rare] * 7).log()
    head = random_head(target, has_lm_head=not head_agrees)
    with torch.no_grad():
        target.set_output_embeddings(torch.nn.Linear(16, VOCAB))
        target.lm_head.weight.zero_()
        target.lm_head.bias.copy_(logits)
        head.markov_head.markov_w2.weight.zero_()
        if not head_agrees:
            head.lm_head.weight.zero_()
    return target, head


@pytest.mark.parametrize("half", [None, drawn_in_bf16, ratio_in_bf16], ids=["float32", "draw in bf16", "ratio in bf16"])
@pytest.mark.parametrize(("rare", "head_agrees"), [(0.0025, True), (0.0001, False)])
def test_precision(half, rare, head_agrees, monkeypatch):
    """Probabilities that eight bits cannot tell from others: a draft drawn so, or an accept ratio taken so, is seen."""
    if half is not None:
        if head_agrees is (half is ratio_in_bf16):
            pytest.skip("a draw is seen where all drafts pass, a ratio where nearly none does")
        half(monkeypatch)
    target, head = steep(rare, head_agrees)
    p_value = fit(sample(target, head, top_k=0), exact_joint(target, PROMPT, []))
    assert p_value > PASSES if half is None else p_value < FAILS
