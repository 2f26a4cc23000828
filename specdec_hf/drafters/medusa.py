"""Medusa: a tree of candidates from several heads on the target's last hidden state.

The tree is sparse: of all combinations of the heads' guesses, the nodes that are accepted most often by the accuracies
measured for each head and rank. Drawn without replacement when sampling, so the text keeps the target's distribution
(the original's typical acceptance does not). Source: Cai et al., "Medusa", arXiv 2401.10774.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._hf import text_config
from ..heads.medusa import MedusaHead
from ..options import SpeculativeConfig
from ..proposal import Proposal
from ..targets import TapRecorder
from ..tree import best_tree, chance_of, parents_of
from .base import Drafter, DraftRequest, Observation, Prompt

_MOST = 64


class MedusaDrafter(Drafter):
    """Drives a `MedusaHead`.

    Args:
        head: bound to the target.
        layers: the target's decoder layers, which is the tap behind its final norm.
        target_vocab_size: V, the width of the target's logits.
    """

    name = "medusa"

    def __init__(self, head: MedusaHead, layers: int, target_vocab_size: int) -> None:
        self._head = head
        self.target_layer_ids = [layers]
        config = head.config
        narrower = config.draft_vocab_size != target_vocab_size  # reduced, or the target's logits are padded
        self._vocabulary = head.draft_token_ids() if narrower else None
        ranks = [row[: config.draft_vocab_size] for row in config.accuracies]
        self._paths = best_tree(ranks, max(_MOST, config.tree_nodes))
        self._parents = parents_of(self._paths)
        self.max_tokens = len(self._paths)
        self.default_tokens = min(config.tree_nodes, self.max_tokens)
        self.max_depth = config.medusa_num_heads
        # A threshold cuts nodes by what was measured before, never by the tokens drawn.
        self._chances = torch.tensor([chance_of(path, ranks) for path in self._paths])
        self._hidden: Tensor  # [B, D], the state that yielded each row's anchor

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.name, id(self._head))

    @classmethod
    def create(cls, head: Any, target: Any, config: SpeculativeConfig) -> MedusaDrafter:
        if not isinstance(head, MedusaHead):
            raise TypeError(
                f"speculative='medusa' needs a MedusaHead as assistant_model, not {type(head).__name__}. Load one with "
                "MedusaHead.from_pretrained(...)."
            )
        text = text_config(target)
        return cls(head.bind(target), text.num_hidden_layers, text.vocab_size)

    def start(self, prompt: Prompt) -> None:
        states = prompt.taps[0]
        if prompt.valid is None:
            self._hidden = states[:, -1]
            return
        columns = torch.arange(states.shape[1], device=prompt.valid.device)
        last = torch.where(prompt.valid, columns, -1).amax(dim=1).to(states.device)
        self._hidden = states[torch.arange(len(last), device=states.device), last]

    def propose(self, request: DraftRequest) -> Proposal:
        paths, logits = self._paths[: request.width], self._logits(request)
        depths = max(map(len, paths))
        tokens = request.anchors.new_zeros(len(request.limits), len(paths))
        kept: list[Tensor] = []  # distributions, in the order of their groups
        group_of = [0] * len(paths)
        vocabulary = None
        for depth in range(1, depths + 1):
            level = [node for node, path in enumerate(paths) if len(path) == depth]
            groups: dict[tuple[int, ...], list[int]] = {}
            for node in level:
                # Below every node of a level stand the same guesses, unless processors look at the path.
                groups.setdefault(paths[node][:-1] if request.sampler.depends_on_path else (), []).append(node)
            for nodes in groups.values():
                drawn, probs, vocabulary = request.sampler.siblings(
                    logits[:, depth - 1], _first_of_each_rank(paths, nodes), self._above(nodes[0], tokens),
                    self._vocabulary,
                )  # fmt: skip
                for node in nodes:
                    tokens[:, node], group_of[node] = drawn[:, paths[node][-1]], len(kept)
                if probs is not None:
                    kept.append(probs)
        spread = torch.stack(kept, dim=1)[:, group_of] if kept else None
        parents = torch.tensor(self._parents[: len(paths)]).expand(len(request.limits), -1)
        chances = self._chances[: len(paths)].to(tokens.device).expand(len(request.limits), -1)
        return Proposal(tokens, list(request.limits), None, spread, vocabulary, chances, parents)

    def _logits(self, request: DraftRequest) -> Tensor:
        """[B, K, Vd], the heads' guesses behind each row's anchor."""
        with torch.no_grad():
            return self._head(self._hidden.to(self._head.device, self._head.dtype))

    def _above(self, node: int, tokens: Tensor) -> Tensor:
        """The tokens [B, d] of a node's ancestors, from the top down."""
        path: list[int] = []
        while (node := self._parents[node]) >= 0:
            path.insert(0, node)
        return tokens[:, path]

    def observe(self, observation: Observation) -> None:
        states = observation.taps[0]
        last = torch.tensor(observation.counts, device=states.device) - 1
        self._hidden = states[torch.arange(len(last), device=states.device), last]

    def select_rows(self, rows: list[int]) -> None:
        self._hidden = self._hidden[torch.tensor(rows, device=self._hidden.device)]


def _first_of_each_rank(paths: list[tuple[int, ...]], nodes: list[int]) -> list[int]:
    """Of nodes of one level, by rank: the first that has it. Its random number is then no other draw's."""
    first: dict[int, int] = {}
    for node in nodes:
        first.setdefault(paths[node][-1], node)
    return [first[rank] for rank in range(len(first))]


@torch.no_grad()
def measure(
    head: MedusaHead, target: Any, texts: list[Tensor], masks: list[Tensor], ranks: int = 8
) -> list[list[float]]:
    """How often the token was each head's guess of each rank; sets ``head.config.rank_accuracies``.

    Args:
        head: the head; it is bound to the target.
        target: the model.
        texts: LongTensors [T], texts that the target wrote.
        masks: bool [T] each, True at tokens that count: those that the target wrote itself.
        ranks: R, how many guesses of a head are looked at.

    Returns:
        K lists of R shares; a list is all zeros but the first, which is 0 too, if no token could be looked at.
    """
    heads, ranks = head.config.medusa_num_heads, min(ranks, head.config.draft_vocab_size)
    head.bind(target)
    ids = head.draft_token_ids()
    hits, seen = torch.zeros(heads, ranks), torch.zeros(heads)
    for text, mask in zip(texts, masks, strict=True):
        layers = text_config(target).num_hidden_layers
        with TapRecorder(target, [layers]) as recorder:
            output = target(input_ids=text[None].to(target.device), use_cache=False, **recorder.forward_kwargs)
            states = recorder.collect(output)[0][0].to(head.device, head.dtype)
        for k in range(heads):
            wanted = mask[k + 2 :].nonzero().squeeze(1)
            if not len(wanted):
                continue
            guesses = ids[head(states[wanted.to(states.device)], k).float().topk(ranks, dim=-1).indices].cpu()
            hits[k] += (guesses == text.cpu()[wanted.cpu() + k + 2][:, None]).sum(dim=0)
            seen[k] += len(wanted)
    shares = (hits / seen.clamp(min=1)[:, None]).tolist()
    head.config.rank_accuracies = [[round(share, 4) for share in row] for row in shares]
    return head.config.rank_accuracies
