"""Token trees: their shape, what a node sees, what stays of the cache, and that text and distribution are the target's.

A drafter made for these tests drafts trees of any shape from a table, so that the loop is tested without any head.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from test_forward import runner
from torch import Tensor
from transformers import GenerationConfig

from specdec_hf import SpeculativeConfig, _hf, drafters, last_speculation, verify
from specdec_hf.drafters.base import Drafter
from specdec_hf.processors import DraftSampler
from specdec_hf.proposal import Proposal, Round
from specdec_hf.tree import TokenTree, chain_parents, first_path

sys.path.insert(0, str(Path(__file__).parent / "contract"))
import harness
from test_distribution import CASES, FAILS, PASSES, PROMPT, exact_joint, fit, options_of, small_target

#: two roots; the first has two children, of which the second has one; the second root has one child
BUSHY = [-1, -1, 0, 0, 3, 1]


# -- shape ------------------------------------------------------------------------------------------------------------


def test_shape():
    tree = TokenTree.of(torch.tensor([BUSHY, [-1, 0, 1, 2, 3, 4]]))
    assert tree.depths.tolist() == [[1, 1, 2, 2, 3, 2], [1, 2, 3, 4, 5, 6]] and tree.depth == 6
    assert tree.steps[0].tolist() == [0, 1, 1, 2, 2, 3, 2]
    assert tree.ancestors[0, 5].tolist() == [True, True, False, False, True, True, False]
    assert tree.paths[0, :, :3].tolist() == [
        [-1, -1, -1], [0, -1, -1], [1, -1, -1], [0, 2, -1], [0, 3, -1], [0, 3, 4], [1, 5, -1],
    ]  # fmt: skip
    assert tree.leaves()[0].tolist() == [False, False, True, False, True, True]
    assert tree.depth_of(0, 2) == 1 and tree.depth_of(0, 6) == 3 and tree.depth_of(0, 0) == 0
    chain = TokenTree.of(chain_parents(2, 3))
    assert torch.equal(chain.ancestors, torch.ones(4, 4).tril().bool().expand(2, -1, -1))
    assert chain.steps.tolist() == [[0, 1, 2, 3]] * 2 and first_path(BUSHY) == [0, 2]
    assert TokenTree.of(torch.zeros(1, 0, dtype=torch.long)).depth == 0
    for wrong in ([0], [1, -1], [-2]):
        with pytest.raises(ValueError, match="stand behind its parent"):
            TokenTree.of(torch.tensor([wrong]))


def test_parts_of_a_proposal():
    probs = torch.rand(1, 6, 9)
    proposal = Proposal(torch.arange(6)[None], [6], None, probs, parents=torch.tensor([BUSHY]))
    assert proposal.trimmed([3]).parents.tolist() == [[-1, -1, 0]]
    flat = proposal.no_deeper([2])
    assert flat.tokens.tolist() == [[0, 1, 2, 3, 5]] and flat.parents.tolist() == [[-1, -1, 0, 0, 1]]
    assert torch.equal(flat.probs, probs[:, [0, 1, 2, 3, 5]]) and flat.lengths == [5]
    assert proposal.no_deeper([0]).tokens.shape == (1, 0)
    chain = proposal.first_path()
    assert chain.parents is None and chain.tokens.tolist() == [[0, 2]] and chain.lengths == [2]
    assert chain.token_probs.tolist() == [[probs[0, 0, 0], probs[0, 2, 2]]]
    assert Round(6, 2, 3, 3).acceptable == 3 and Round(6, 2, 3).acceptable == 6


# -- what a node sees -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2"])
@torch.no_grad()
def test_nodes_see_their_own_branch(family, attention):
    """Every node's logits equal a plain forward of its branch alone; so do they after a path was kept, in ragged rows
    with left padding, windows shorter than the text, and with one row.
    """
    target = make_target(
        family,
        spread=1.0,
        eos_token_id=None,
        attn_implementation=attention,
        **({} if family in ("llama", "gpt2") else {"sliding_window": 6}),
    )
    torch.manual_seed(3)
    text = torch.randint(3, 96, (2, 64))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    run = runner(target, mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    run.prefill(text[:, :9], GenerationConfig())
    rows, pads = [0, 1], [0, 3]
    said = [text[row, pads[row] : 10].tolist() for row in rows]  # committed tokens, the anchor last
    shapes = [[BUSHY, [-1, 0, -1, 1, 3, 2]], [[-1, -1, -1, 2, 3], [-1, 0, 0, 2, 2]], [[-1, 0, 0, 1], [-1, 0, 0, 2]]]
    kept = [[[1, 5], [0, 1, 3]], [[2, 3, 4], []], [[0], [0, 2, 3]]]
    for parents, paths in zip(shapes, kept, strict=True):
        tree = TokenTree.of(torch.tensor([parents[row] for row in rows]))
        count = tree.parents.shape[1]
        lengths = [len(own) + pads[row] for own, row in zip(said, rows, strict=True)]
        drafted = torch.randint(3, 96, (len(rows), count))
        block = torch.zeros(len(rows), 64, dtype=torch.long)
        for place, row in enumerate(rows):
            block[place, : lengths[place]] = torch.tensor([0] * pads[row] + said[place])
            block[place, lengths[place] : lengths[place] + count] = drafted[place]
        outputs, positions, tokens = run.block(block, lengths, count, tree)
        for place in range(len(rows)):
            for column in range(count + 1):
                path = [node for node in tree.paths[place, column].tolist() if node >= 0]
                branch = said[place] + drafted[place, path].tolist()
                expected = target(torch.tensor([branch])).logits[0, -1]
                torch.testing.assert_close(outputs.logits[place, column], expected, atol=1e-5, rtol=1e-5)
                assert positions[place, column] == len(branch) - 1
                assert tokens[place, column] == branch[-1]
        chosen = [paths[row] for row in rows]
        run.keep_path([[0, *(node + 1 for node in path)] for path in chosen])
        run.commit([len(path) + 1 for path in chosen])
        for place, path in enumerate(chosen):
            said[place] += [*drafted[place, path].tolist(), int(text[0, len(said[place])])]
    run.select_rows([1])
    assert run.filled == [len(said[1]) + 3 - 1]
    block = torch.tensor([[0, 0, 0, *said[1], 7, 8, 9]])
    outputs, _, _ = run.block(block, [len(said[1]) + 3], 3, TokenTree.of(torch.tensor([[-1, -1, 0]])))
    for column, tail in enumerate([[], [7], [8], [7, 9]]):
        expected = target(torch.tensor([said[1] + tail])).logits[0, -1]
        torch.testing.assert_close(outputs.logits[0, column], expected, atol=1e-5, rtol=1e-5)


# -- a drafter of any trees -------------------------------------------------------------------------------------------


class TableDrafter(Drafter):
    """Drafts trees of one shape. Siblings come from a table by the token above them, or from a text that was taught."""

    name = "table"
    target_layer_ids = [0]
    parents: list[int] = BUSHY
    text: Tensor | None = None
    chosen = False
    spread = 1.5

    def __init__(self, vocab: int) -> None:
        self.max_tokens = len(self.parents)
        self.max_depth = TokenTree.of(torch.tensor([self.parents])).depth
        self.table = self.spread * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(5))
        self.seen: list[Tensor] = []

    @classmethod
    def create(cls, head: Any, target: Any, config: SpeculativeConfig) -> TableDrafter:
        cls.latest = cls(target.config.vocab_size)
        return cls.latest

    def start(self, prompt: Any) -> None:
        self.taps = [list(row) for row in prompt.taps[0]]
        if prompt.valid is not None:
            self.taps = [
                [t for t, real in zip(row, valid, strict=True) if real]
                for row, valid in zip(self.taps, prompt.valid, strict=True)
            ]

    def propose(self, request: Any) -> Proposal:
        batch, count = len(request.limits), request.width
        tokens = torch.zeros(batch, count, dtype=torch.long)
        probs = None
        for above in sorted(set(self.parents[:count])):
            group = [node for node in range(count) if self.parents[node] == above]
            path, at = [], above
            while at >= 0:
                path.insert(0, at)
                at = self.parents[at]
            logits = self.table[tokens[:, above] if above >= 0 else request.anchors]
            if self.text is not None:
                logits = logits.clone()
                for row in range(batch):
                    place = request.lengths[row] + len(path)
                    if place < self.text.shape[1] and place % 5:
                        rank = len(group) - 1 if place % 2 else 0
                        order = logits[row].argsort(descending=True)
                        right = int(self.text[row, place])
                        others = [t for t in order.tolist() if t != right]
                        others.insert(rank, right)
                        logits[row, others] = torch.arange(len(others), 0, -1.0)
            if self.chosen:
                drawn, group_probs = logits.topk(len(group)).indices, None
            else:
                drawn, group_probs, _ = request.sampler.siblings(logits, group, tokens[:, path])
            tokens[:, group] = drawn
            if group_probs is not None:
                probs = group_probs.new_zeros(batch, count, group_probs.shape[1]) if probs is None else probs
                probs[:, group] = group_probs[:, None]
        parents = torch.tensor(self.parents[:count]).expand(batch, -1)
        return Proposal(tokens, list(request.limits), None, probs, parents=parents)

    def observe(self, observation: Any) -> None:
        for row, count in enumerate(observation.counts):
            self.taps[row].extend(observation.taps[0][row, :count])

    def select_rows(self, rows: list[int]) -> None:
        self.taps = [self.taps[row] for row in rows]


@pytest.fixture
def table(monkeypatch):
    """Lets every strategy's name mean a fresh subclass of ``TableDrafter``."""

    def use(**attributes: Any) -> Any:
        cls = type("Used", (TableDrafter,), attributes)
        monkeypatch.setattr(drafters, "drafter_class", lambda name: cls)
        return cls

    return use


def speculate(model: Any, ids: Tensor, **kwargs: Any) -> Any:
    return model.generate(ids, **{"speculative": "table", "do_sample": False, **kwargs})


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "attention"), [*((name, "sdpa") for name in harness.FAMILIES), ("mistral", "eager")]
)
def test_greedy_text_is_the_targets(family, attention, table):
    target = harness.target(family, attention)
    call = {**harness.padded_prompt(3), "max_new_tokens": 24, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    plain = target.generate(**call, do_sample=False)
    cls = table(text=plain)
    assert target.generate(**call, do_sample=False, speculative="table").tolist() == plain.tolist()
    single = harness.prompt(1)
    plain = target.generate(single, do_sample=False, max_new_tokens=40)
    cls.text = plain
    result = speculate(target, single, max_new_tokens=40)
    assert result.tolist() == plain.tolist()
    stats = last_speculation(target)
    harness.check_stats(stats, 6)
    if family != "bloom":
        assert stats.mean_accepted_length > 1.8, "taught siblings are accepted, first or not"
        assert max(map(max, stats.accepted_lengths)) == 4
        assert len(stats.acceptance_by_position) == 3, "three places deep, not six nodes wide"
    else:
        assert max(map(max, stats.proposal_lengths)) == 2, "a chain of first children where masks must be 2-D"


@pytest.mark.parametrize("level", [False, True])
def test_batches_taps_and_stops(level, table):
    """Rows of a batch, taps of exactly the committed text, an end inside a path, budgets, chat turns with cache."""
    target = harness.target("llama")
    call = harness.padded_prompt(3)
    plain = target.generate(**call, max_new_tokens=30, do_sample=False)
    cls = table(text=plain)
    rules = {"logits_processor": [harness.Favour()]} if level else {}
    plain = target.generate(**call, max_new_tokens=30, do_sample=False, **rules)
    cls.text = plain
    result = target.generate(
        **call, max_new_tokens=30, do_sample=False, speculative="table", **rules, return_dict_in_generate=True
    )
    assert result.sequences.tolist() == plain.tolist()
    assert result.speculation.mean_accepted_length > 1.2
    states = target(
        plain, attention_mask=torch.cat((call["attention_mask"], torch.ones(3, 30)), 1), output_hidden_states=True
    ).hidden_states[1]
    for row in range(len(cls.latest.taps)):
        own = torch.stack(cls.latest.taps[row])
        if len(cls.latest.taps) == 3:
            expected = states[row, plain.shape[1] - 30 - int(call["attention_mask"][row].sum()) :]
            torch.testing.assert_close(own, expected[: len(own)], atol=1e-4, rtol=1e-4)
    for budget in (1, 2, 3):
        short = speculate(
            target, call["input_ids"], attention_mask=call["attention_mask"], max_new_tokens=budget, **rules
        )
        assert short.tolist() == plain[:, : 9 + budget].tolist()
    for place in range(10, 22):
        stop = int(plain[0, place])
        expected = target.generate(**call, max_new_tokens=30, do_sample=False, eos_token_id=stop, **rules)
        got = speculate(
            target,
            call["input_ids"],
            attention_mask=call["attention_mask"],
            max_new_tokens=30,
            eos_token_id=stop,
            **rules,
        )
        assert got.tolist() == expected.tolist()


def test_chat_turn_with_cache(table):
    target = harness.target("mistral")
    ids = harness.prompt(2, 12)
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    cls = table(text=plain)
    first = speculate(target, ids, max_new_tokens=20, return_dict_in_generate=True)
    more = torch.cat((first.sequences, harness.prompt(2, 5, seed=4)), dim=1)
    whole = target.generate(more, max_new_tokens=15, do_sample=False)
    cls.text = whole
    second = speculate(target, more, max_new_tokens=15, **{_hf.CACHE_KEY: first[_hf.CACHE_KEY]})
    assert second.tolist() == whole.tolist()


def test_hidden_states_and_attentions(table):
    target = harness.target("llama", "eager")
    ids = harness.prompt(1)
    wanted = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    for extra in ({}, {"output_attentions": True}):
        plain = target.generate(ids, max_new_tokens=12, do_sample=False, **wanted, **extra)
        table(text=plain.sequences)
        result = speculate(target, ids, max_new_tokens=12, **wanted, **extra)
        assert result.sequences.tolist() == plain.sequences.tolist()
        for name in ("scores", "logits"):
            torch.testing.assert_close(torch.stack(result[name]), torch.stack(plain[name]), atol=1e-4, rtol=1e-4)
        for own, other in zip(result.hidden_states[1:], plain.hidden_states[1:], strict=True):
            torch.testing.assert_close(own[-1], other[-1], atol=1e-4, rtol=1e-4)
        if extra:
            for own, other in zip(result.attentions[1:], plain.attentions[1:], strict=True):
                torch.testing.assert_close(own[0], other[0], atol=1e-4, rtol=1e-4)


# -- distribution -----------------------------------------------------------------------------------------------------


def drawn(target: Any, rows: int = 2000, samples: int = 8000, **kwargs: Any) -> Tensor:
    ids = torch.tensor(PROMPT).expand(rows, -1)
    calls = [
        target.generate(ids, max_new_tokens=6, do_sample=True, speculative="table", **kwargs)[:, ids.shape[1] :]
        for _ in range(samples // rows)
    ]
    return torch.cat(calls)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("case", ["plain", "top_k", "combined"])
def test_sampling_is_exact(case, chosen, table):
    target = small_target()
    table(chosen=chosen)
    tokens = drawn(target, **options_of(case))
    assert fit(tokens, exact_joint(target, PROMPT, CASES[case][1])) > PASSES
    assert max(map(max, last_speculation(target).accepted_lengths)) > 3


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_step_by_step_is_the_same_rule(do_sample, chosen):
    """What rows that stay level are judged by, against a whole tree at once, numbers for numbers."""
    rows, vocab, count = 900, 4, len(BUSHY)
    scores = torch.randn(rows, count + 1, vocab) * 0.5
    probs = torch.rand(rows, count, vocab).softmax(-1)
    probs[:, 1], probs[:, 3] = probs[:, 0], probs[:, 2]
    tokens = torch.stack([torch.randperm(vocab)[[0, 1, 2, 3, 0, 1]] for _ in range(rows)])
    lengths = [row % (count + 1) for row in range(rows)]
    tree = TokenTree.of(torch.tensor(BUSHY).expand(rows, -1))
    proposal = Proposal(tokens, lengths, None, None if chosen else probs, parents=tree.parents)
    uniforms = torch.rand(rows, count + 1, dtype=torch.float64)
    if do_sample:
        whole = verify.verify_sampled(scores.softmax(-1), proposal, uniforms, tree)
    else:
        whole = verify.verify_greedy(scores.argmax(-1), proposal, tree)
    at, moving = torch.full((rows,), -1), torch.ones(rows, dtype=torch.bool)
    accepted, following = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    for _ in range(tree.depth + 1):
        step = verify.verify_node(
            scores[torch.arange(rows), at + 1], proposal, tree, at, uniforms if do_sample else None
        )
        kept, nodes, chosen_tokens = step
        following = torch.where(moving & ~kept, chosen_tokens, following)
        moving = moving & kept
        at, accepted = torch.where(moving, nodes, at), accepted + moving
    assert torch.equal(accepted, whole.accepted) and torch.equal(following, whole.next_tokens)
    assert accepted.max() == 3 and accepted.min() == 0
    ends = torch.where(accepted > 0, whole.path.gather(1, (accepted - 1).clamp(min=0)[:, None]).squeeze(1), -1)
    assert torch.equal(ends, at), "the path leads to where the walk ended"


def with_replacement(patch: Any) -> None:
    def siblings(self: Any, logits: Tensor, nodes: list[int], path: Tensor, vocabulary: Any = None) -> Any:
        probs = logits.float().softmax(-1)
        drawn = [verify.draw(probs, self._uniforms[:, node]) for node in nodes]
        return torch.stack(drawn, 1), probs, None

    patch.setattr(DraftSampler, "siblings", siblings)


def residual_of_the_first_only(patch: Any) -> None:
    patch.setattr(verify, "residual", lambda target_probs, draft_probs: target_probs)


def one_set_of_numbers(patch: Any) -> None:
    """Siblings judged with the number of the first."""
    real = verify.accepts
    latest: dict[str, Tensor] = {}

    def same(target: Tensor, draft: Any, uniforms: Tensor) -> Tensor:
        latest.setdefault("u", uniforms)
        uniforms = latest["u"] if latest["u"].shape == uniforms.shape else uniforms
        return real(target, draft, uniforms)

    patch.setattr(verify, "accepts", same)


@pytest.mark.parametrize(
    "wrong", [with_replacement, residual_of_the_first_only, one_set_of_numbers], ids=lambda wrong: wrong.__name__
)
def test_wrong_trees_fail(wrong, table, monkeypatch):
    target = small_target()
    table()
    wrong(monkeypatch)
    assert fit(drawn(target, **options_of("plain")), exact_joint(target, PROMPT, [])) < FAILS
