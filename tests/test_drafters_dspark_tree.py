"""Trees of the DSpark drafter: the best nodes, the target's text and distribution, one draft in any company."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_hf import DSparkConfig, DSparkDraftModel, SpeculativeConfig, drafters, last_speculation
from specdec_hf.drafters.dspark import DSparkDrafter
from specdec_hf.processors import DraftSampler
from specdec_hf.tree import TokenTree

sys.path.insert(0, str(Path(__file__).parent / "contract"))
import harness
from test_distribution import (
    CASES,
    FAILS,
    PASSES,
    PROMPT,
    Never,
    exact_joint,
    fit,
    options_of,
    random_head,
    sample,
    small_target,
)

KINDS = ["vanilla", "gated", "rnn"]


def tree(nodes: int = 6, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(strategy="dspark", draft_tree_nodes=nodes, **options)


@pytest.fixture
def proposals(monkeypatch):
    """Every proposal that the drafter made, as (request, proposal), as long as the request's sampler is usable."""
    made: list[Any] = []
    real = DSparkDrafter.propose

    def propose(self: Any, request: Any) -> Any:
        made.append((self, request, real(self, request)))
        return made[-1][2]

    monkeypatch.setattr(DSparkDrafter, "propose", propose)
    return made


# -- the tree ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_probable_nodes(kind, proposals, monkeypatch):
    """Against all paths of up to three tokens, each run through the head as a chain of its own."""
    from specdec_hf.drafters import dspark

    monkeypatch.setattr(dspark, "_BEAM", 64)
    monkeypatch.setattr(dspark, "_CHILDREN", 8)
    target = small_target()
    head = random_head(target, block_size=3, markov_head_type=kind)
    blocks = []
    real = head.draft_block
    monkeypatch.setattr(head, "draft_block", lambda *args: blocks.append(real(*args)) or blocks[-1])
    target.generate(
        torch.tensor([PROMPT]), assistant_model=head, speculative=tree(20), do_sample=False, max_new_tokens=6
    )
    _, request, proposal = proposals[0]
    hidden, base = blocks[0]

    def chance(path: tuple[int, ...]) -> float:
        previous, state, result = int(request.anchors[0]), None, 1.0
        for k, token in enumerate(path):
            logits, _, state = head.markov_step(state, torch.tensor([previous]), hidden[:, k], base[:, k])
            result, previous = result * logits.softmax(-1)[0, token].item(), token
        return result

    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(8), repeat=depth)]
    best = sorted(paths, key=chance, reverse=True)[:20]
    shape = TokenTree.of(proposal.parents)
    got = [tuple(proposal.tokens[0, [n for n in nodes if n >= 0]].tolist()) for nodes in shape.paths[0, 1:].tolist()]
    assert sorted(got) == sorted(best)
    expected = sorted(map(chance, best), reverse=True)
    torch.testing.assert_close(proposal.confidence[0], torch.tensor(expected), atol=1e-5, rtol=1e-4)


def test_fewer_nodes_are_the_beginning_of_more(proposals):
    target = small_target()
    head = random_head(target)
    kept = {}
    for count in (2, 5, 9):
        proposals.clear()
        call = {"assistant_model": head, "speculative": tree(9), "num_assistant_tokens": count, "do_sample": False}
        target.generate(torch.tensor([PROMPT]), max_new_tokens=8, **call)
        kept[count] = proposals[0][2]
    for count in (2, 5):
        assert kept[count].tokens.tolist() == kept[9].tokens[:, :count].tolist()
        assert kept[count].parents.tolist() == kept[9].parents[:, :count].tolist()
    assert max(map(max, last_speculation(target).proposal_lengths)) == 9


def test_more_nodes_than_there_are():
    target = small_target(vocab_size=4)
    head = random_head(target, block_size=2)
    target.generate(torch.tensor([[3, 1]]), assistant_model=head, speculative=tree(99), max_new_tokens=8)
    assert max(map(max, last_speculation(target).proposal_lengths)) == 4 + 4 * 4
    head = random_head(target, block_size=1)
    target.generate(torch.tensor([[3, 1]]), assistant_model=head, speculative=tree(99), max_new_tokens=8)
    assert max(map(max, last_speculation(target).proposal_lengths)) == 4


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agreement", ["always", "sometimes"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom", "mixtral"])
def test_greedy_text_is_the_targets(family, agreement):
    target = harness.target(family)
    call = {**harness.padded_prompt(3), "max_new_tokens": 24, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    stats = harness.compare(target, lambda: dict(call), agreement=agreement, expect_rounds=False, **options()).stats
    harness.check_stats(stats, 9)
    deep = 4 if family == "bloom" else 9
    assert max(map(max, stats.proposal_lengths)) <= deep
    if agreement == "always":
        assert stats.mean_accepted_length > 2


def options(nodes: int = 9) -> dict[str, Any]:
    return {"draft_tree_nodes": nodes}


@pytest.mark.parametrize("fields", [{"markov_rank": 0}, {"markov_head_type": "rnn", "draft_vocab_size": 64}])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_other_heads_and_thresholds(fields, threshold):
    target = harness.target("llama")
    config = DSparkConfig.for_target(
        target.config, num_hidden_layers=1, block_size=4, **{"markov_rank": 8, **fields}, enable_confidence_head=False
    )
    torch.manual_seed(1)
    head = DSparkDraftModel(config).eval()
    if head.config.has_reduced_vocab:
        head.set_draft_vocabulary(torch.arange(64))
    call = {**harness.padded_prompt(3), "max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**call)
    speculative = tree(9, assistant_confidence_threshold=threshold)
    assert target.generate(**call, assistant_model=head, speculative=speculative).tolist() == plain.tolist()
    lengths = {length for row in last_speculation(target).proposal_lengths for length in row}
    assert (max(lengths) == 9) if threshold is None else (max(lengths) < 9), lengths


# -- distribution -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["plain", "top_k", "combined"])
def test_sampling_is_exact(case, kind):
    target = small_target()
    head = random_head(target, markov_head_type=kind, **({"draft_vocab_size": 5} if kind == "gated" else {}))
    tokens = sample(target, head, speculative=tree(), **options_of(case))
    assert fit(tokens, exact_joint(target, PROMPT, CASES[case][1])) > PASSES
    assert max(map(max, last_speculation(target).accepted_lengths)) > 2


@pytest.mark.parametrize("threshold", [0.05, 0.3])
def test_cut_trees_are_exact(threshold):
    target = small_target()
    speculative = tree(8, assistant_confidence_threshold=threshold)
    tokens = sample(target, random_head(target), speculative=speculative, **options_of("top_p"))
    assert fit(tokens, exact_joint(target, PROMPT, CASES["top_p"][1])) > PASSES
    assert len({length for row in last_speculation(target).proposal_lengths for length in row}) > 2


def test_level_rows_are_exact():
    """Judged one position at a time, as a criterion of the user's forces it, the trees cut to the shortest row."""
    target = small_target(vocab_size=4, spread=0.4)
    head, prompts = random_head(target, bias=0.05), [[3, 1, 2], [1, 3, 3]]
    call = {"assistant_model": head, "do_sample": True, "top_k": 0, "max_new_tokens": 4, "speculative": tree(5)}
    calls = [target.generate(torch.tensor(prompts), stopping_criteria=[Never()], **call)[:, 3:] for _ in range(250)]
    for row, prompt in enumerate(prompts):
        tokens = torch.stack([one[row] for one in calls])
        assert fit(tokens, exact_joint(target, prompt, [], length=3)) > PASSES, f"prompt {prompt}"


def test_nodes_that_are_kept_for_their_own_tokens_are_not(monkeypatch):
    """What the order of things in a tree is for: ranked by the tokens that were drawn, likely tokens come too often."""
    real = DraftSampler.children

    def children(self: Any, *args: Any) -> Any:
        tokens, _, probs, vocabulary = real(self, *args)
        return tokens, probs.gather(2, tokens), probs, vocabulary

    monkeypatch.setattr(DraftSampler, "children", children)
    target = small_target()
    tokens = sample(target, random_head(target), speculative=tree(3), **options_of("plain"))
    assert fit(tokens, exact_joint(target, PROMPT, [])) < FAILS


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
@pytest.mark.parametrize("coupling", ["residual", "gumbel"])
def test_rows_are_their_single_runs(coupling, schedule):
    target = small_target(eos_token_id=2)
    head = random_head(target)
    ids: Tensor = torch.tensor([PROMPT, [4, 4, 1, 0], [1, 5, 3, 3]])
    call = {"assistant_model": head, "do_sample": True, "max_new_tokens": 24, "top_k": 0, "pad_token_id": 0}

    def config(*seeds: int) -> SpeculativeConfig:
        random = {"seed": list(seeds)} if coupling == "gumbel" else {"generator": generators(*seeds)}
        return tree(9, coupling=coupling, num_assistant_tokens_schedule=schedule, **random)

    together = target.generate(ids, speculative=config(1, 2, 3), **call)
    assert last_speculation(target).mean_accepted_length > 1.2
    for row in range(3):
        alone = target.generate(ids[row : row + 1], speculative=config(row + 1), **call)
        assert together[row, : alone.shape[1]].tolist() == alone[0].tolist()


def test_only_dspark_drafts_them():
    assert [name for name in drafters.available() if drafters.drafter_class(name).draws] == []  # a matter of the call
    with pytest.raises(ValueError, match="draft_tree_nodes=0"):
        tree(0)
