"""DSpark: a block in one pass from the target's hidden states, made coherent by a Markov head.

Source: "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation" (Cheng et al., 2026).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._hf import text_config
from ..heads.dspark import DSparkDraftModel
from ..options import SpeculativeConfig
from ..proposal import Proposal
from .base import Drafter, DraftRequest, Observation, Prompt

#: Children that a tree drafts below a node, and nodes of a depth below which it drafts any.
_CHILDREN, _BEAM = 4, 4
#: Plain rounds after which the head reads along all the same, so that their hidden states do not pile up.
_MOST_UNREAD = 64


@dataclass
class _Parked:
    """Context keys and values of rows that left the batch: [L, Hkv, T, head_dim] each."""

    keys: Tensor
    values: Tensor


class DSparkDrafter(Drafter):
    """Drives a `DSparkDraftModel`.

    Args:
        head: the draft head, bound to the target.
        target_vocab_size: V, the width of the target's logits.
        config: `draft_top_k`, `draft_tree_nodes` and the confidence threshold are read.
    """

    name = "dspark"

    def __init__(self, head: DSparkDraftModel, target_vocab_size: int, config: SpeculativeConfig) -> None:
        self._head = head
        self._top_k = config.draft_top_k
        by_cost = config.num_assistant_tokens_schedule == "throughput"
        self._wants_confidence = (config.confidence_threshold > 0 or by_cost) and not config.draft_tree_nodes
        self.target_layer_ids = list(head.config.target_layer_ids)
        self.max_tokens = head.max_draft_tokens
        self._is_tree = bool(config.draft_tree_nodes)
        if config.draft_tree_nodes:
            # The first depth has one group of siblings, every other one at most a group below each node of the beam.
            children = min(_CHILDREN, head.config.draft_vocab_size)
            candidates = children * (1 + min(_BEAM, children) * (head.max_draft_tokens - 1))
            self.max_depth, self.draws = head.max_draft_tokens, _CHILDREN * (1 + _BEAM * (head.max_draft_tokens - 1))
            self.max_tokens = min(config.draft_tree_nodes, candidates)
        narrower = head.config.draft_vocab_size != target_vocab_size  # reduced, or the target's logits are padded
        self._vocabulary = head.draft_token_ids() if narrower else None
        self._context: Any = None
        self._lengths: list[int] = []  # context tokens of each row
        self._unread: list[Observation] = []  # of plain rounds: one token of each row, read together before a draft
        self._parked: dict[int, _Parked] = {}
        self._latest_logits: Tensor | None = None  # of the latest round's last slot, for `complaint`

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.name, id(self._head))

    @classmethod
    def create(cls, head: Any, target: Any, config: SpeculativeConfig) -> DSparkDrafter:
        if not isinstance(head, DSparkDraftModel):
            raise TypeError(
                f"speculative='dspark' needs a DSparkDraftModel as assistant_model, not {type(head).__name__}. Load "
                "one with DSparkDraftModel.from_pretrained(...)."
            )
        head.bind(target)
        needs_confidence = config.confidence_threshold and not config.draft_tree_nodes
        if needs_confidence and not head.config.enable_confidence_head:
            raise ValueError(
                f"assistant_confidence_threshold={config.confidence_threshold} needs a confidence head and this draft "
                "head has none (enable_confidence_head=False): leave the threshold out."
            )
        return cls(head, text_config(target).vocab_size, config)

    def start(self, prompt: Prompt) -> None:
        batch, new = prompt.positions.shape
        counts = [new] * batch if prompt.valid is None else prompt.valid.sum(dim=1).tolist()
        context = self._kept_context(prompt)
        self._lengths = list(prompt.cached) if context is not None else [0] * batch
        self._context = context if context is not None else self._head.new_context(batch, new)  # grows as text does
        if prompt.valid is None:
            self._extend(prompt.taps, prompt.positions, counts)
            return
        # Padding stands on the left (or in holes); the context takes the valid columns, packed to the left.
        order = torch.argsort((~prompt.valid).long(), dim=1, stable=True)
        taps = [tap.gather(1, order.to(tap.device)[:, :, None].expand_as(tap)) for tap in prompt.taps]
        self._extend(taps, prompt.positions.gather(1, order), counts)

    def _kept_context(self, prompt: Prompt) -> Any:
        """The context of earlier turns, if it came with the cache; None to begin anew."""
        if not any(prompt.cached):
            return None
        context = prompt.state
        if context is None or context.batch_size != len(prompt.cached):
            reason = "was not filled by a DSpark generate() call with this head"
        elif any(own < cached for own, cached in zip(context.lengths.tolist(), prompt.cached, strict=True)):
            reason = "has grown since this head last saw it"
        else:
            context.rollback(torch.tensor(prompt.cached), max_length=max(prompt.cached))
            context.uniform = len(set(prompt.cached)) == 1
            return context
        warnings.warn(
            f"The cache passed in {reason}. The text stays right, but the draft head lacks the hidden states of "
            f"{max(prompt.cached)} cached tokens, so fewer drafted tokens will be accepted. For full speed pass on "
            "the cache that generate(..., return_dict_in_generate=True) returned with this head, or prefill with it.",
            UserWarning,
            stacklevel=2,
        )
        return None

    def _extend(self, taps: list[Tensor], positions: Tensor, counts: list[int]) -> None:
        """Add the first `counts[b]` columns of each row to the context."""
        longest = max(counts)
        self._lengths = [have + new for have, new in zip(self._lengths, counts, strict=True)]
        taps, positions = [tap[:, :longest] for tap in taps], positions[:, :longest]
        if min(counts) == longest and self._context.uniform:
            self._head.extend_context(self._context, taps, positions)
        else:
            self._head.extend_context(
                self._context, taps, positions, torch.tensor(counts), max_length=max(self._lengths)
            )

    def propose(self, request: DraftRequest) -> Proposal:
        self._catch_up()
        return self._tree(request) if self._is_tree else self._chain(request)

    def _chain(self, request: DraftRequest) -> Proposal:
        head, sampler = self._head, request.sampler
        hidden, base = head.draft_block(self._context, request.anchors, request.positions, request.width)
        previous, state, confidence = request.anchors, None, []
        for k in range(request.width):
            logits, survival, state = head.markov_step(state, previous, hidden[:, k], base[:, k], top_k=self._top_k)
            if self._wants_confidence and survival is not None:
                confidence.append(survival)
            previous = sampler.sample(logits, self._vocabulary)
        self._latest_logits = logits
        tokens, token_probs, probs, columns = sampler.drafted()
        scores = head.confidence_probs(torch.stack(confidence, dim=1)) if confidence else None
        return Proposal(tokens, list(request.limits), token_probs, probs, columns, scores)

    def _tree(self, request: DraftRequest) -> Proposal:
        """The nodes of highest joint probability, depth by depth, each behind its parent and its better siblings.

        A node's chance is its parent's times the r-th largest probability behind the parent, r being its place among
        siblings: known before its token is drawn, so which nodes stay never depends on their own tokens, and sampling
        stays exact. The first n nodes are the tree of n nodes, which makes a row's tree the same in any batch.
        """
        head, sampler = self._head, request.sampler
        batch, depths = request.anchors.shape[0], min(request.width, head.max_draft_tokens)
        hidden, base = head.draft_block(self._context, request.anchors, request.positions, depths)
        above, chances = request.anchors[:, None], torch.ones(batch, 1, device=request.anchors.device)  # [B, F]
        places = torch.full_like(above, -1)  # of the nodes to go on from, among all candidates
        paths, state = above[:, :, None][:, :, :0], None
        candidates: list[tuple[Tensor, ...]] = []  # tokens, chances, parents, groups of siblings: [B, F * C] a depth
        kept: list[Tensor] = []  # distributions behind the nodes of each depth: [B, F, W]
        drawn = groups = count = 0
        for depth in range(depths):
            width = above.shape[1]
            slot, guess = (part[:, depth, None].expand(-1, width, -1).flatten(0, 1) for part in (hidden, base))
            logits, _, state = head.markov_step(state, above.flatten(), slot, guess, top_k=self._top_k)
            logits = logits.unflatten(0, (batch, width))
            tokens, ranked, probs, vocabulary = sampler.children(logits, paths, _CHILDREN, drawn, self._vocabulary)
            drawn += tokens[0].numel()
            ranked = chances[:, :, None] * ranked
            parents = places[:, :, None].expand_as(tokens)
            group = torch.arange(groups, groups + width, device=tokens.device)[:, None].expand_as(tokens)
            candidates.append(tuple(part.flatten(1) for part in (tokens, ranked, parents, group)))
            if probs is not None:
                kept.append(probs)
            best = _best(ranked.flatten(1), _BEAM)
            owner = best // tokens.shape[2]  # which of the F nodes each stands below
            above, chances = (part.flatten(1).gather(1, best) for part in (tokens, ranked))
            paths = torch.cat((_rows(paths, owner), above[:, :, None]), dim=2)
            state = None if state is None else _rows(state.unflatten(0, (batch, width)), owner).flatten(0, 1)
            places, groups, count = best + count, groups + width, count + tokens[0].numel()
        self._latest_logits = logits
        tokens, ranked, parents, group = (torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True))
        best = _best(ranked, request.width)
        spread = _rows(torch.cat(kept, dim=1), group.gather(1, best)) if kept else None
        # Places among the candidates become places among the nodes.
        numbers = torch.arange(best.shape[1], device=best.device).expand_as(best)
        place_of, parents = torch.full_like(parents, -1).scatter_(1, best, numbers), parents.gather(1, best)
        parents = torch.where(parents < 0, parents, place_of.gather(1, parents.clamp(min=0)))
        confidence = ranked.gather(1, best)
        limits = [min(limit, best.shape[1]) for limit in request.limits]
        return Proposal(tokens.gather(1, best), limits, None, spread, vocabulary, confidence, parents)

    def observe(self, observation: Observation) -> None:
        # While nothing is drafted, the head need not read along: many tokens at once cost it little more than one.
        if observation.positions.shape[1] == 1:
            taps = [tap.clone() for tap in observation.taps]  # a compiled target may write over its own outputs
            self._unread.append(replace(observation, taps=taps))
            if len(self._unread) >= _MOST_UNREAD:
                self._catch_up()
            return
        self._catch_up()
        self._extend(observation.taps, observation.positions, observation.counts)

    def _catch_up(self) -> None:
        """Read what plain rounds left unread."""
        if not self._unread:
            return
        taps = [torch.cat(parts, dim=1) for parts in zip(*(one.taps for one in self._unread), strict=True)]
        positions = torch.cat([one.positions for one in self._unread], dim=1)
        self._unread.clear()
        self._extend(taps, positions, [positions.shape[1]] * positions.shape[0])

    def complaint(self) -> str | None:
        # NaN stays in the context once it is there, so the latest logits tell; rounds need not wait for the device.
        if self._latest_logits is None or not bool(self._latest_logits.isnan().any()):
            return None
        return (
            f"the draft head ({type(self._head).__name__}, {self._head.dtype}) returns NaN, so its drafted tokens are "
            "of no use. The text stays right but comes no faster: check the head's weights, or load it in float32 or "
            "bfloat16."
        )

    def select_rows(self, rows: list[int]) -> None:
        self._catch_up()
        self._lengths = [self._lengths[row] for row in rows]
        self._context.select_rows(torch.tensor(rows), max_length=max(self._lengths))
        self._context.uniform = len(set(self._lengths)) == 1

    def park(self, rows: dict[int, int]) -> None:
        self._catch_up()
        for number, row in rows.items():
            keys, values = self._row(row)
            self._parked[number] = _Parked(keys.clone(), values.clone())

    def state(self, numbers: list[int]) -> Any:
        self._catch_up()
        if not self._parked:
            return self._context
        rows = {number: _Parked(*self._row(row)) for row, number in enumerate(numbers)} | self._parked
        held = [rows[number].keys.shape[2] for number in range(len(rows))]
        whole = self._head.new_context(len(rows), max(held))
        for number, length in enumerate(held):
            whole.keys[:, number, :, :length] = rows[number].keys
            whole.values[:, number, :, :length] = rows[number].values
        whole.lengths.copy_(torch.tensor(held))
        whole.max_length, whole.uniform = max(held), len(set(held)) == 1
        return whole

    def _row(self, row: int) -> tuple[Tensor, Tensor]:
        end = self._lengths[row]
        return self._context.keys[:, row, :, :end], self._context.values[:, row, :, :end]


def _best(chances: Tensor, count: int) -> Tensor:
    """The places [B, at most count] of the largest chances [B, M], falling; of equal ones the first stands first."""
    return chances.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """``values[b, index[b, i]]``, of [B, F, ...] by [B, I]."""
    return values[torch.arange(values.shape[0], device=values.device)[:, None], index.to(values.device)]
