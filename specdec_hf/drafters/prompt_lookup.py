"""Prompt lookup: where the latest tokens stand earlier in the text, what followed them there is drafted.

No assistant, no weights, no hidden states. Source: Saxena, "Prompt Lookup Decoding" (2023); Yang et al., arXiv
2304.04487. Unlike transformers' own (5.24), the most recent match is taken, n-grams are not shorter than a minimum, and
a match that runs into the end of the text goes on with its own beginning, so a loop of any period is drafted whole.
"""

from __future__ import annotations

from typing import Any

import torch

from ..options import SpeculativeConfig
from ..proposal import Proposal
from .base import Drafter, DraftRequest, Observation, Prompt

_MOST = 32
_LONGEST, _SHORTEST = 3, 2


class PromptLookupDrafter(Drafter):
    """Looks the latest tokens of each row up in its own text. A row without a match drafts nothing, and costs nothing.

    Args:
        sizes: lengths of n-grams to look for, the best first.
        stop_ids: end-of-sequence ids; a draft ends with the first of them.
        max_tokens: most tokens per round.
    """

    name = "prompt_lookup"
    target_layer_ids: list[int] = []
    default_tokens = 10

    def __init__(self, sizes: list[int], stop_ids: set[int], max_tokens: int = _MOST) -> None:
        self._sizes, self._stop_ids, self.max_tokens = sizes, stop_ids, max_tokens

    @classmethod
    def create(cls, head: Any, target: Any, config: SpeculativeConfig) -> PromptLookupDrafter:
        if head is not None:
            raise TypeError(
                f"speculative='prompt_lookup' drafts from the text itself and takes no assistant_model "
                f"({type(head).__name__} given): leave it out, or name the strategy that uses it."
            )
        longest, shortest = config.max_matching_ngram_size, config.min_matching_ngram_size
        longest = longest or max(_LONGEST, shortest or 0)
        shortest = shortest or min(_SHORTEST, longest)
        if shortest > longest:  # the maximum may come from another place than the configuration, which checks its own
            raise ValueError(
                f"min_matching_ngram_size={shortest} is larger than max_matching_ngram_size={longest}: swap them, or "
                "leave one out."
            )
        ends = target.generation_config.eos_token_id
        stop_ids = set(ends) if isinstance(ends, (list, tuple)) else {ends}
        most = max(_MOST, config.num_assistant_tokens or 0, config.max_assistant_tokens or 0)
        return cls(list(range(longest, shortest - 1, -1)), stop_ids, most)

    def start(self, prompt: Prompt) -> None:
        """Nothing: each round reads the text anew, which takes microseconds."""

    def propose(self, request: DraftRequest) -> Proposal:
        texts = request.ids.to("cpu", torch.int32)
        drafts = [
            self._continuation(texts[row, :length].numpy().tobytes(), limit) if limit else []
            for row, (length, limit) in enumerate(zip(request.lengths, request.limits, strict=True))
        ]
        width = max(map(len, drafts))
        tokens = torch.tensor([draft + [0] * (width - len(draft)) for draft in drafts], dtype=torch.long)
        return Proposal(tokens.view(len(drafts), width).to(request.ids.device), [len(draft) for draft in drafts])

    def _continuation(self, text: bytes, limit: int) -> list[int]:
        """At most `limit` tokens that followed the latest n-gram where it stood before; `text` is int32."""
        for size in self._sizes:
            begin = _latest(text, text[-4 * size :]) if len(text) > 4 * size else -1
            if begin < 0:
                continue
            found = memoryview(text)[begin + 4 * size :].cast("i")[:limit].tolist()
            # Beyond the end of the text the draft follows itself: the text repeats with this period.
            draft = [found[i % len(found)] for i in range(limit)]
            ends = [place for place, token in enumerate(draft) if token in self._stop_ids]
            return draft[: ends[0] + 1] if ends else draft
        return []

    def observe(self, observation: Observation) -> None:
        """Nothing: the text is in every request."""

    def select_rows(self, rows: list[int]) -> None:
        """Nothing is held per row."""


def _latest(text: bytes, ngram: bytes) -> int:
    """Byte offset of the latest occurrence of an int32 n-gram before the one at the end of the text; -1 = none."""
    end = len(text) - 1  # the one at the end does not fit below this
    while (begin := text.rfind(ngram, 0, end)) >= 0 and begin % 4:
        end = begin + len(ngram) - 1  # bytes that straddle tokens: look before them
    return begin
