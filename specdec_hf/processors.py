"""A `LogitsProcessorList` over a block of positions, each position with its true prefix.

Processors fall into three kinds. *Fixed* ones (temperature, top-k, top-p, ...) look at the scores of one position only
and take a whole block in one call. *Prefix* ones (repetition penalty, n-gram blocking, minimum length, ...) are a pure
function of their own row's prefix: one call per position and group of rows of equal length. All *other* ones (a user's
own, grammars, prefix constraints, classifier-free guidance, watermarks) may carry state or know their row's number, so
they must see what
plain decoding shows them: every row, each committed position once, in order. Decoding then judges one position at a
time (`ProcessorStack.in_order` tells), and the draft, which would show them tokens that may be rejected, does without
them. A processor of the user's that is a pure function of its row's prefix may say so with an attribute
`pure_function_of_prefix = True` and is then treated as a prefix one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ._hf import FIXED_PROCESSORS, PREFIX_PROCESSORS
from .tree import TokenTree
from .verify import draw


def _is_fixed(processor: Any) -> bool:
    return type(processor) in FIXED_PROCESSORS


def _is_prefix(processor: Any) -> bool:
    return type(processor) in PREFIX_PROCESSORS or getattr(processor, "pure_function_of_prefix", False) is True


def _uses_ids(processor: Any) -> bool:
    """Whether columns must be the target's token ids for this processor (temperature and cut-offs do not care)."""
    return _is_prefix(processor) or type(processor).__name__ == "SuppressTokensLogitsProcessor"


class ProcessorStack:
    """The processors of one `generate()` call.

    Args:
        processors: the prepared `LogitsProcessorList`.
    """

    def __init__(self, processors: Any) -> None:
        self._all = processors
        self._pure = [p for p in processors if _is_fixed(p) or _is_prefix(p)]
        self._pure_rows = list(self._pure)
        #: True when some processor must be called exactly as plain decoding calls it.
        self.in_order = len(self._pure) < len(processors)
        #: True when columns must be target ids for some processor that the draft applies.
        self.uses_ids = any(map(_uses_ids, self._pure))
        #: True when some processor looks at the tokens before a position.
        self.has_prefix = not all(map(_is_fixed, self._pure))
        self.is_empty = not processors

    def one_position(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Every processor on one position of all rows, as plain decoding does it.

        Args:
            ids: LongTensor [B, L], the common prefix.
            scores: float32 [B, V].
        """
        return self._all(ids, scores)

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows of the batch, in that order, in processors that hold something per row."""
        self._pure_rows = [_of_rows(processor, rows) for processor in self._pure_rows]

    def block(self, ids: Tensor, starts: list[int], scores: Tensor, tree: TokenTree | None = None) -> Tensor:
        """All processors on a block; only valid when `in_order` is False.

        Args:
            ids: LongTensor [B, capacity], each row's tokens from column 0 on, drafted ones included.
            starts: per row, the length of the prefix of the block's first position.
            scores: float32 [B, S, V].
            tree: how the drafted tokens stand to one another; None = a chain.

        Returns:
            float32 [B, S, V]; position i of row b processed with the prefix `ids[b, : starts[b] + i]`, or in a tree
            with `ids[b, : starts[b]]` and the path down to node i - 1.
        """
        if tree is not None and tree.depth:
            return self._block_of_trees(ids, starts, scores, tree)
        for processor in self._pure_rows:
            if _is_fixed(processor):
                scores = _fixed(processor, ids, scores)
                continue
            columns = [_prefix(processor, ids, [s + i for s in starts], scores[:, i]) for i in range(scores.shape[1])]
            scores = torch.stack(columns, dim=1)
        return scores

    def _block_of_trees(self, ids: Tensor, starts: list[int], scores: Tensor, tree: TokenTree) -> Tensor:
        """`block` where each node has its own path as prefix."""
        ids = ids[:, : max(starts) + tree.parents.shape[1]].clone()
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
        behind = torch.tensor(starts, device=ids.device)[:, None]
        tokens = ids[rows, behind + torch.arange(tree.parents.shape[1], device=ids.device)]
        paths, depths = tree.paths, tree.steps.tolist()
        columns = behind + torch.arange(tree.depth, device=ids.device)
        for processor in self._pure_rows:
            if _is_fixed(processor):
                scores = _fixed(processor, ids, scores)
                continue
            done = []
            for place in range(scores.shape[1]):
                ids[rows, columns] = tokens.gather(1, paths[:, place].clamp(min=0))
                lengths = [start + own[place] for start, own in zip(starts, depths, strict=True)]
                done.append(_prefix(processor, ids, lengths, scores[:, place]))
            scores = torch.stack(done, dim=1)
        return scores

    def draft(self, ids: Tensor, lengths: list[int], scores: Tensor) -> Tensor:
        """The pure processors on one position of the draft: `scores` float32 [B, W], prefix `ids[b, : lengths[b]]`."""
        for processor in self._pure_rows:
            if _is_fixed(processor):
                scores = processor(ids[:, :1], scores)
            else:
                scores = _prefix(processor, ids, lengths, scores)
        return scores


def _fixed(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    flat = scores.flatten(0, 1)
    return processor(ids[:1, :1].expand(flat.shape[0], -1), flat).view_as(scores)


def _of_rows(processor: Any, rows: list[int]) -> Any:
    """The processor for a part of the batch: the repetition penalty may hold the padding length of each row (5.20)."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor) or ignored.shape[0] == 1:
        return processor
    part = copy.copy(processor)
    part.prompt_ignore_length = ignored[torch.tensor(rows, device=ignored.device)]
    return part


def _prefix(processor: Any, ids: Tensor, lengths: list[int], scores: Tensor) -> Tensor:
    if len(set(lengths)) == 1:
        return processor(ids[:, : lengths[0]], scores)
    result = torch.empty_like(scores)
    for length in sorted(set(lengths)):
        rows = [row for row, own in enumerate(lengths) if own == length]
        index = torch.tensor(rows, device=scores.device)
        result[index] = _of_rows(processor, rows)(ids[index, :length], scores[index])
    return result


class UniformStream:
    """The random numbers of one call, float64 in [0, 1).

    Every round takes all it needs in one draw per row, so a row that has its own generator gets the same numbers
    whatever its neighbours do.

    Args:
        generator: None for torch's global stream, one `torch.Generator` for all rows, or a list with one per row.
        batch_size: rows B.

    Raises:
        ValueError: a list whose length is not B.
    """

    def __init__(self, generator: Any, batch_size: int, device: torch.device) -> None:
        if isinstance(generator, (list, tuple)) and len(generator) != batch_size:
            raise ValueError(
                f"generator has {len(generator)} entries for {batch_size} rows: pass one torch.Generator, or a list "
                "with exactly one per row (after num_return_sequences)."
            )
        self._generator = generator
        self._device = device

    def take(self, numbers: list[int], limits: list[int], width: int, draws: int | None = None) -> Tensor:
        """Numbers for one round.

        Args:
            numbers: the call's row number of each row.
            limits: tokens that each row may draft.
            width: the largest limit, K.
            draws: numbers to draw drafted tokens with, U, for each row that drafts; None = one a token, K.

        Returns:
            float64 [B, U + K + 1]: U to draw drafted tokens with, K to accept them with, one for the token that
            follows; U = 0 if no row drafts.
        """
        drawing = width if draws is None or not width else draws
        if not isinstance(self._generator, (list, tuple)):
            device = self._generator.device if self._generator is not None else self._device
            shape = (len(numbers), drawing + width + 1)
            return torch.rand(shape, dtype=torch.float64, generator=self._generator, device=device).to(self._device)
        rows = torch.zeros(len(numbers), drawing + width + 1, dtype=torch.float64)
        for row, (number, limit) in enumerate(zip(numbers, limits, strict=True)):
            own = self._generator[number]
            first = limit if draws is None or not limit else draws
            drawn = torch.rand(first + limit + 1, dtype=torch.float64, generator=own, device=own.device).cpu()
            rows[row, :first], rows[row, drawing : drawing + limit] = drawn[:first], drawn[first : first + limit]
            rows[row, -1] = drawn[-1]
        return rows.to(self._device)


def accept_numbers(uniforms: Tensor, width: int, draws: int | None = None) -> Tensor:
    """Of a round's numbers (see `UniformStream.take`), those that judge `width` <= K drafted tokens and draw the one
    that follows.
    """
    drawn = uniforms.shape[1] // 2 if draws is None else draws
    return torch.cat((uniforms[:, drawn : drawn + width], uniforms[:, -1:]), dim=1)


def _draw_different(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw C different columns [R, C] of each row of `probs` [R, W] without replacement, by `uniforms` [R, C].

    Where nothing is left to draw from, any column that was not drawn yet: it is then chosen, and the accept rule takes
    it as such.
    """
    left, free, drawn = probs, torch.ones_like(probs), []
    for place in range(uniforms.shape[1]):
        empty = left.sum(dim=-1, keepdim=True) <= 0
        column = draw(torch.where(empty, free, left), uniforms[:, place])
        left, free = (t.scatter(1, column[:, None], 0.0) for t in (left, free))
        drawn.append(column)
    return torch.stack(drawn, dim=1)


class DraftSampler:
    """Draws drafted tokens, and keeps the very distributions that they were drawn from.

    Args:
        stack: the call's processors.
        ids: LongTensor [B, capacity], the rows' tokens; drafted ones are written behind the committed ones, since
            prefix processors and the target's block need them there.
        lengths: committed tokens of each row.
        positions: LongTensor [B], the same on the device.
        vocab_size: V.
        uniforms: float64 [B, at least K or what the drafter asks for (`Drafter.draws`)] to draw with.
        noise: float32 [B, at least K, V], to choose the largest of noisy scores with (coupled sampling). With neither,
            the most likely token is drafted. Both choices are a one-hot distribution.
    """

    def __init__(
        self,
        stack: ProcessorStack,
        ids: Tensor,
        lengths: list[int],
        positions: Tensor,
        vocab_size: int,
        uniforms: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> None:
        self._stack, self._ids, self._lengths = stack, ids, lengths
        self._positions, self._vocab_size = positions, vocab_size
        self._uniforms, self._noise = uniforms, noise
        self._rows = torch.arange(ids.shape[0], device=ids.device)
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._token_probs: list[Tensor] = []
        self._vocabulary: Tensor | None = None

    def sample(self, logits: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """Draw the next drafted token of each row.

        Args:
            logits: [B, W] in any float type; made float32 here, once, for both the draw and the accept ratio.
            vocabulary: LongTensor [W], the target id of each column, None for all V ids in order.

        Returns:
            LongTensor [B] of target ids.
        """
        place = len(self._tokens)
        scores, vocabulary = self._scores(logits, vocabulary, place)
        columns = scores.argmax(dim=-1) if self._uniforms is None else self._draw(scores, self._uniforms[:, place])
        tokens = columns if vocabulary is None else vocabulary[columns]
        self._ids[self._rows, self._positions + place] = tokens
        self._tokens.append(tokens)
        self._vocabulary = vocabulary
        return tokens

    def _scores(self, logits: Tensor, vocabulary: Tensor | None, place: int) -> tuple[Tensor, Tensor | None]:
        """Scores to choose from behind `place` drafted tokens, which stand in the ids; the ids of columns.

        Of logits [B, W]; of logits [B, F, W] too where nothing depends on the path.
        """
        scores = logits.to(self._ids.device, torch.float32)
        if vocabulary is not None and self._stack.uses_ids:
            full = scores.new_full((*scores.shape[:-1], self._vocab_size), float("-inf"))
            full[..., vocabulary] = scores
            scores, vocabulary = full, None
        if not self._stack.is_empty:
            # Some processors refuse NaN, which only a broken head returns. Any finite number is a valid draft instead.
            scores = torch.nan_to_num(scores, nan=-1e4, posinf=1e4, neginf=float("-inf"))
            if scores.dim() == 2:
                scores = self._stack.draft(self._ids, [length + place for length in self._lengths], scores)
            else:
                scores = self._stack.block(self._ids, self._lengths, scores)
        if self._noise is not None:
            noise = self._noise[:, place]
            noise = noise if vocabulary is None else noise[:, vocabulary]
            scores = scores + (noise if scores.dim() == 2 else noise[:, None])
        return scores, vocabulary

    @property
    def depends_on_path(self) -> bool:
        """Whether siblings below different nodes of one depth must be drawn apart: processors look at the path."""
        return self._stack.has_prefix

    def siblings(
        self, logits: Tensor, nodes: list[int], path: Tensor, vocabulary: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Draw different tokens to stand below one node of a tree, without replacement, the best first if greedy.

        Groups of one depth may share a draw: at most one of them is ever judged.

        Args:
            logits: [B, W] in any float type.
            nodes: one index of the round's tree per sibling; no other draw of the round may name the same.
            path: LongTensor [B, d], the tokens down to the node, itself included; d = 0 at the anchor.
            vocabulary: as in `sample`.

        Returns:
            LongTensor [B, C] of C = min(len(nodes), W) target ids; float32 [B, W'], the distribution that the first
            was drawn from, None if they were chosen; and the target ids of its columns (None = all in order).
        """
        if path.shape[1]:
            self.enter(path)
        scores, vocabulary = self._scores(logits, vocabulary, path.shape[1])
        count = min(len(nodes), scores.shape[1])
        if self._uniforms is None:
            columns, probs = scores.nan_to_num(nan=float("-inf")).topk(count, dim=-1).indices, None
        else:
            probs = self._probabilities(scores)
            columns = _draw_different(probs, self._uniforms[:, nodes[:count]])
        return (columns if vocabulary is None else vocabulary[columns]), probs, vocabulary

    def children(
        self, logits: Tensor, paths: Tensor, count: int, first: int, vocabulary: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """`siblings` below F nodes of each row at once, with the chance of each place among siblings.

        Args:
            logits: [B, F, W] in any float type.
            paths: LongTensor [B, F, d], the tokens down to each node, itself included; d = 0 at the anchor.
            count: children of a node, C; fewer if the vocabulary is smaller.
            first: the first of the F * C random numbers that are used.
            vocabulary: as in `sample`.

        Returns:
            LongTensor [B, F, C] of target ids; float32 [B, F, C], the C largest probabilities behind each node, which
            depend on no token that is drawn there; float32 [B, F, W'], the distribution behind each node, None if
            tokens were chosen; and the target ids of its columns (None = all in order).
        """
        place = paths.shape[2]
        if self.depends_on_path:
            apart = []
            for node in range(logits.shape[1]):
                if place:
                    self.enter(paths[:, node])
                apart.append(self._scores(logits[:, node], vocabulary, place))
            scores, vocabulary = torch.stack([own for own, _ in apart], dim=1), apart[0][1]
        else:
            scores, vocabulary = self._scores(logits, vocabulary, place)
        count = min(count, scores.shape[2])
        if self._uniforms is None:
            best = scores.nan_to_num(nan=float("-inf")).topk(count, dim=-1)
            columns, probs = best.indices, None
            chances = (best.values - scores.logsumexp(dim=-1, keepdim=True)).exp().nan_to_num_(nan=0.0)
        else:
            probs = self._probabilities(scores)
            chances = probs.topk(count, dim=-1).values
            numbers = self._uniforms[:, first : first + scores.shape[1] * count].reshape(-1, count)
            columns = _draw_different(probs.flatten(0, 1), numbers).view_as(chances)
        return (columns if vocabulary is None else vocabulary[columns]), chances, probs, vocabulary

    def enter(self, tokens: Tensor) -> None:
        """Write a proposal's tokens [B, K] behind the committed ones: the block that the target reads, whoever drew."""
        columns = self._positions[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self._ids[self._rows[:, None], columns] = tokens

    def _draw(self, scores: Tensor, uniforms: Tensor) -> Tensor:
        probs = self._probabilities(scores)
        columns = draw(probs, uniforms)
        self._probs.append(probs)
        self._token_probs.append(probs.gather(1, columns[:, None]).squeeze(1))
        return columns

    @staticmethod
    def _probabilities(scores: Tensor) -> Tensor:
        probs = torch.nan_to_num(scores.softmax(dim=-1))
        # A row that nothing may be drawn from (all scores -inf, or NaN from a broken head) still drafts a token. It
        # is then chosen, not drawn, so its distribution is one-hot; the accept rule stays exact.
        probs[..., 0] += (probs.sum(dim=-1) <= 0).float()
        return probs

    def drafted(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(tokens [B, K], token_probs, probs, vocabulary), as `Proposal` wants them."""
        tokens = torch.stack(self._tokens, dim=1)
        if self._uniforms is None:
            return tokens, None, None, None
        return tokens, torch.stack(self._token_probs, 1), torch.stack(self._probs, 1), self._vocabulary
