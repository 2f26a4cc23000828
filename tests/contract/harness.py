"""What the contract tests share: tiny targets, assistants that agree as much as wanted, and the comparison itself.

A test states a call; ``compare`` runs it plainly and speculatively and asserts equal token ids. Every strategy that
``specdec_hf.drafters.available()`` finds is tested if there is a ``make_<strategy>`` here: add one for a new strategy.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from conftest import FAMILIES as BASE_FAMILIES
from conftest import SMALL, make_target
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, StoppingCriteria

from specdec_hf import (
    DSparkConfig,
    DSparkDraftModel,
    EarlyExitConfig,
    EarlyExitHead,
    MedusaConfig,
    MedusaHead,
    SpeculativeConfig,
    drafters,
    enable_speculation,
    last_speculation,
)
from specdec_hf.drafters.draft_model import DraftModelDrafter
from specdec_hf.drafters.early_exit import EarlyExitDrafter
from specdec_hf.drafters.medusa import MedusaDrafter
from specdec_hf.drafters.prompt_lookup import PromptLookupDrafter
from specdec_hf.proposal import Proposal

VOCAB = 96
PAD = 0
WINDOW = 8
AGREEMENTS = ("always", "sometimes", "never")

_SLIDING = {"sliding_window": WINDOW}
_MIXED = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "mistral": _SLIDING,
    "gemma2": _MIXED,
    "gemma3_text": _MIXED,
    "phi3": {},
    "gpt2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
    "bloom": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {},
}
"""Families under the contract; sliding windows are far shorter than the texts."""
FURTHER: dict[str, dict[str, Any]] = {}
"""Families that `target` makes too, which files of tests add for themselves."""
EAGER_ONLY = ("gemma2", "bloom")


@functools.cache
def target(family: str = "llama", attention: str = "sdpa", seed: int = 0, **overrides: Any) -> Any:
    """A tiny target with speculation enabled, built once a session; a test that changes its target builds its own."""
    return fresh_target(family, attention, seed, **overrides)


def fresh_target(family: str = "llama", attention: str = "sdpa", seed: int = 0, **overrides: Any) -> Any:
    """As ``target``, but the caller's own: no end-of-sequence id unless a call names one."""
    known = dict(BASE_FAMILIES)
    BASE_FAMILIES.setdefault(family, {})
    try:
        attention = "eager" if family in EAGER_ONLY else attention
        config = {
            "num_hidden_layers": 2,
            "attn_implementation": attention,
            **{**FAMILIES, **FURTHER}[family],
            **overrides,
        }
        model = make_target(family, seed=seed, **config)
    finally:
        BASE_FAMILIES.clear()
        BASE_FAMILIES.update(known)
    model.generation_config.eos_token_id = None
    return enable_speculation(model)


# -- assistants --------------------------------------------------------------------------------------------------------


def assistant(strategy: str, model: Any, agreement: str = "always", **options: Any) -> Any:
    """An assistant for ``model``; ``teach`` it texts, and it drafts them as ``agreement`` says."""
    return globals()[f"make_{strategy}"](model, agreement, **options)


class TaughtDSpark(DSparkDraftModel):
    """A real head that runs in full, and then lifts the logit of the token that the taught text has next.

    ``always`` drafts the taught text, ``never`` always another token, ``sometimes`` another one at a third of the
    positions. Without a taught text it drafts what its random weights say.
    """

    agreement = "always"

    def teach(self, sequences: Tensor, positions: Tensor) -> None:
        """Learn texts [B, L] whose tokens stand at rotary positions [B, L] (negative ones are skipped)."""
        self.table: dict[tuple[int, int], list[int]] = {}
        for tokens, places in zip(sequences.tolist(), positions.tolist(), strict=True):
            for column, (token, place) in enumerate(zip(tokens, places, strict=True)):
                if place >= 0:
                    self.table.setdefault((place, token), tokens[column + 1 : column + 1 + self.max_draft_tokens])

    def draft_block(self, context: Any, anchor_ids: Tensor, positions: Tensor, num_tokens: int | None = None) -> Any:
        hidden, base = super().draft_block(context, anchor_ids, positions, num_tokens)
        base = base.clone()
        ids = {token: column for column, token in enumerate(self.draft_token_ids().tolist())}
        for row, key in enumerate(zip(positions.tolist(), anchor_ids.tolist(), strict=True)):
            for slot, token in enumerate(getattr(self, "table", {}).get(key, [])[: base.shape[1]]):
                if self.agreement == "never" or (self.agreement == "sometimes" and _errs_at(key[0] + slot)):
                    token = (token + 1) % self.config.vocab_size
                if token in ids:
                    base[row, slot, ids[token]] += 500.0
        return hidden, base


def _errs_at(position: int) -> bool:
    return random.Random(position).random() < 0.35


def make_dspark(model: Any, agreement: str, block_size: int = 4, **overrides: Any) -> TaughtDSpark:
    config = DSparkConfig.for_target(
        model.config, **{"num_hidden_layers": 1, "block_size": block_size, "markov_rank": 8, **overrides}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        head = TaughtDSpark(config).eval()
    head.agreement = agreement
    return head


class Teachable:
    """An assistant's taught texts, for those that draft token by token or look texts up."""

    agreement = "always"
    max_draft_tokens = 4
    teach = TaughtDSpark.teach

    def following(self, position: int, token: int) -> list[int]:
        """What the taught text has behind a token at a rotary position; empty where it is unknown there."""
        return getattr(self, "table", {}).get((position, token), [])

    def adjusted(self, token: int, position: int) -> int:
        """A token of the taught text as ``agreement`` wants it drafted behind a rotary position."""
        wrong = self.agreement == "never" or (self.agreement == "sometimes" and _errs_at(position))
        return (token + wrong) % VOCAB


class TaughtModel(Teachable, LlamaForCausalLM):
    """A causal LM that runs in full and then lifts the logit of the taught token."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        places = position_ids.expand(input_ids.shape).tolist()
        for column in range(1, output.logits.shape[1] + 1):
            for row, tokens in enumerate(input_ids.tolist()):
                for token in self.following(places[row][-column], tokens[-column])[:1]:
                    output.logits[row, -column, self.adjusted(token, places[row][-column])] += 500.0
        return output


def make_draft_model(model: Any, agreement: str, block_size: int = 4, **overrides: Any) -> TaughtModel:
    """A model of one layer, whatever the target's family."""
    sizes = {name: value for name, value in SMALL.items() if name not in overrides}
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    config = LlamaConfig(**{**sizes, "num_hidden_layers": 1, "vocab_size": vocabulary, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        draft = TaughtModel(config).eval()
    config.speculative_strategy = "draft_model"
    draft.agreement, draft.max_draft_tokens = agreement, block_size
    return draft


class TaughtLookup(Teachable):
    """Stands for the absent assistant: what is looked up is then overwritten with the taught text."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(speculative_strategy="prompt_lookup")


class TaughtLookupDrafter(PromptLookupDrafter):
    """Looks up in full, then drafts the taught text where it is known.

    Without a taught text it drafts what it found, and else tokens that depend on all of the text.
    """

    head: Any = None

    def propose(self, request: Any) -> Proposal:
        found = super().propose(request)
        drafts = []
        for row, limit in enumerate(request.limits):
            key = (int(request.positions[row]), int(request.anchors[row]))
            draft = [self.head.adjusted(token, key[0] + k) for k, token in enumerate(self.head.following(*key))]
            if not hasattr(self.head, "table"):
                text = int(request.ids[row, : request.lengths[row]].sum())
                draft = found.tokens[row, : found.lengths[row]].tolist() or [(text + k) % VOCAB for k in range(limit)]
            drafts.append(draft[:limit])
        width = max(map(len, drafts))
        filled = torch.tensor([draft + [0] * (width - len(draft)) for draft in drafts], dtype=torch.long)
        return Proposal(filled.view(len(drafts), width), [len(draft) for draft in drafts])


def make_prompt_lookup(model: Any, agreement: str, block_size: int = 4) -> TaughtLookup:
    head = TaughtLookup()
    head.agreement, head.max_draft_tokens = agreement, block_size
    return head


class TaughtExit(Teachable, EarlyExitHead):
    """A real exit head that runs in full and then lifts the logit of the taught token."""

    def forward(self, hidden_states: Tensor, exit_layer: int | None = None) -> Tensor:
        logits = super().forward(hidden_states, exit_layer).clone()
        for row, (place, length) in enumerate(zip(self.request.positions.tolist(), self.request.lengths, strict=True)):
            place += self.step
            for token in self.following(place, int(self.request.ids[row, length - 1 + self.step]))[:1]:
                logits[row, self.adjusted(token, place)] += 500.0
        self.step += 1
        return logits


def make_early_exit(model: Any, agreement: str, block_size: int = 4, **overrides: Any) -> TaughtExit:
    config = EarlyExitConfig.for_target(model.config, **{"exit_layers": [1], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        head = TaughtExit(config).eval()
    head.agreement, head.max_draft_tokens = agreement, block_size
    return head


def _told_what_it_reads(propose: Any) -> Any:
    """A head sees states only; one that was taught a text must know where in it they stand."""

    def told(own: Any, request: Any) -> Proposal:
        if isinstance(own._head, TaughtExit):
            own._head.request, own._head.step = request, 0
        return propose(own, request)

    return told


class TaughtMedusa(Teachable, MedusaHead):
    """Heads that run in full; `TaughtMedusaDrafter` then lifts the logits of the taught text's tokens."""


class TaughtMedusaDrafter(MedusaDrafter):
    """Where the assistant errs, the taught token is the second guess, so that siblings are accepted too."""

    def _logits(self, request: Any) -> Tensor:
        logits = super()._logits(request).float().clone()
        ids = {token: column for column, token in enumerate(self._head.draft_token_ids().tolist())}
        for row, key in enumerate(zip(request.positions.tolist(), request.anchors.tolist(), strict=True)):
            for k, token in enumerate(self._head.following(*key)[: logits.shape[1]]):
                adjusted = self._head.adjusted(token, key[0] + k)
                if self._head.agreement == "never" and token in ids:
                    logits[row, k, ids[token]] -= 500.0
                if self._head.agreement == "sometimes" and token in ids:
                    logits[row, k, ids[token]] += 499.0
                if adjusted in ids:
                    logits[row, k, ids[adjusted]] += 500.0
        return logits


def make_medusa(model: Any, agreement: str, block_size: int = 4, **overrides: Any) -> TaughtMedusa:
    """A chain of `block_size` nodes and two more: another first token, and one below it."""
    shares = [[0.9, 0.5], *([[0.9, 0.1]] * (block_size - 1))]
    config = MedusaConfig.for_target(
        model.config, **{"medusa_num_heads": block_size, "rank_accuracies": shares, **overrides}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        head = TaughtMedusa(config).eval()
        for block in head.blocks:
            torch.nn.init.normal_(block[0].linear.weight, std=0.3)
    head.agreement, head.max_draft_tokens = agreement, block_size + 2 * (block_size > 1)
    return head


def _limited_to_the_assistants_block(cls: Any, taught: Any = None) -> None:
    """Let a drafter draft as many tokens as a test's assistant says; ``taught`` replaces the class for those."""
    create = cls.create.__func__

    def limited(own: Any, head: Any, model: Any, config: Any) -> Any:
        if not isinstance(head, Teachable):
            return create(own, head, model, config)
        drafter = create(taught or own, None if isinstance(head, TaughtLookup) else head, model, config)
        drafter.head, drafter.max_tokens, drafter.default_tokens = head, head.max_draft_tokens, None
        return drafter

    cls.create = classmethod(limited)


_limited_to_the_assistants_block(DraftModelDrafter)
_limited_to_the_assistants_block(EarlyExitDrafter)
_limited_to_the_assistants_block(PromptLookupDrafter, TaughtLookupDrafter)
EarlyExitDrafter.propose = _told_what_it_reads(EarlyExitDrafter.propose)
_limited_to_the_assistants_block(MedusaDrafter, TaughtMedusaDrafter)

STRATEGIES = [name for name in drafters.available() if f"make_{name}" in globals()]


@functools.cache
def shared_assistant(strategy: str, model: Any, agreement: str) -> Any:
    """``assistant`` with default options, built once a session and target."""
    return assistant(strategy, model, agreement)


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What ``compare`` ran: both results, and the statistics of the speculative one."""

    plain: Any
    speculative: Any
    stats: Any


def sequences_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result.sequences


def compare(
    model: Any,
    call: Callable[[], dict[str, Any]],
    strategy: str = "dspark",
    agreement: str = "always",
    head: Any = None,
    positions: Tensor | None = None,
    expect_rounds: bool = True,
    **options: Any,
) -> Outcome:
    """Run ``call()`` (made anew each time: caches and processors have state) both ways; token ids must be equal.

    Args:
        head: the assistant; default a shared one that agrees as ``agreement`` says.
        positions: rotary positions of the text's columns, if they are not the attention mask's running count.
        expect_rounds: whether statistics must show rounds, and accepted tokens for a head that always agrees.
        options: fields of ``SpeculativeConfig``.
    """
    head = shared_assistant(strategy, model, agreement) if head is None else head
    plain = model.generate(**{"do_sample": False, **call()})
    kwargs = {"do_sample": False, **call()}
    head.teach(sequences_of(plain), _positions(kwargs, sequences_of(plain)) if positions is None else positions)
    config = SpeculativeConfig(strategy=strategy, **options)
    result = model.generate(**kwargs, assistant_model=head, speculative=config)
    assert sequences_of(result).tolist() == sequences_of(plain).tolist()
    stats = last_speculation(model)
    if expect_rounds:
        assert stats.fallback is None
        assert stats.rounds > 0
        check_stats(stats, head.max_draft_tokens)
    return Outcome(plain, result, stats)


def check_stats(stats: Any, block_size: int) -> None:
    """Statistics that contradict themselves are worse than none."""
    assert stats.rounds == sum(map(len, stats.accepted_lengths)) == sum(map(len, stats.proposal_lengths))
    assert stats.drafted == sum(map(sum, stats.proposal_lengths))
    assert stats.accepted == sum(map(sum, stats.accepted_lengths)) - stats.rounds
    for gained, proposed in zip(stats.accepted_lengths, stats.proposal_lengths, strict=True):
        assert all(1 <= g <= p + 1 <= block_size + 1 for g, p in zip(gained, proposed, strict=True))
    assert stats.mean_accepted_length == sum(map(sum, stats.accepted_lengths)) / max(stats.rounds, 1)
    assert all(0.0 <= share <= 1.0 for share in stats.acceptance_by_position)
    assert set(stats.seconds) >= {"draft", "target", "other"}
    assert all(value >= 0.0 for value in stats.seconds.values())


def acceptable(stats: Any) -> int:
    """How many drafted tokens could have been accepted: all of a chain's, as many of a tree's as it is deep."""
    return sum(map(sum, stats.proposal_depths))


def _positions(kwargs: dict[str, Any], sequences: Tensor) -> Tensor:
    batch, columns = sequences.shape
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    prompt = kwargs["inputs_embeds"].shape[1] if ids is None else ids.shape[1]
    mask = torch.ones(batch, prompt, dtype=torch.long) if mask is None else mask.long()
    mask = mask.repeat_interleave(batch // mask.shape[0], dim=0)
    added = columns if ids is None else columns - prompt  # embedded prompts are not part of the result
    mask = torch.cat((mask, mask.new_ones(batch, added)), dim=1)
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, -1)[:, -columns:]


def prompt(batch: int = 1, length: int = 9, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (batch, length), generator=generator)


def padded_prompt(batch: int, length: int = 9, seed: int = 0, holes: bool = False) -> dict[str, Tensor]:
    """Rows of different lengths, padded at the left; with ``holes``, some columns among the padding count as text."""
    ids = prompt(batch, length, seed)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : (row * 5 + seed) % (length - 2)] = 0
    mask[0] = 1  # one row fills the width
    if holes:
        for row in range(1, batch):
            mask[row, 0], mask[row, 1:3] = 1, 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


@contextmanager
def caught() -> Iterator[list[str]]:
    """Collects the messages of our own warnings."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        yield messages
    messages.extend(str(r.message) for r in records if "specdec_hf" in r.filename or "speculative" in str(r.message))


# -- processors and criteria of a user's own ---------------------------------------------------------------------------


class Favour(LogitsProcessor):
    """Stateless: what a row may say next depends on the sum of its tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = input_ids.sum(dim=1, keepdim=True) % scores.shape[1]
        return scores + 4.0 * (torch.arange(scores.shape[1]) % 7 == chosen % 7)


class Recorder(LogitsProcessor):
    """Stateful: its calls are recorded, and every call changes what it does next."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(input_ids.tolist())
        scores = scores.clone()
        scores[:, len(self.calls) % 13 + 3] += 5.0
        return scores


class RowStop(StoppingCriteria):
    """Ends a row whose newest token is one of some ids; records what it was shown."""

    def __init__(self, ids: Any) -> None:
        self.ids, self.calls = set(ids), []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls.append(input_ids.tolist())
        return torch.tensor([row[-1] in self.ids for row in input_ids.tolist()])


def empty_config(model: Any) -> Any:
    """The model's own configuration class and values, as a copy."""
    return AutoConfig.for_model(**model.config.to_dict())
