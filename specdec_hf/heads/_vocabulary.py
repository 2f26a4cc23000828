"""A head that proposes from fewer ids than its target has: the table between the two, and its checks."""

from __future__ import annotations

from typing import Any

import torch


class DraftVocabulary:
    """Mixin of a head whose config has ``vocab_size``, ``draft_vocab_size`` and ``has_reduced_vocab``.

    A reduced vocabulary has the buffer ``d2t`` [Vd]: target id = draft id + ``d2t[draft id]``, ascending.
    """

    config: Any
    d2t: torch.Tensor

    def draft_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids, any shape."""
        return ids + self.d2t[ids] if self.config.has_reduced_vocab else ids

    def draft_token_ids(self) -> torch.Tensor:
        """[Vd] target ids that the head can propose, ascending."""
        device = next(self.parameters()).device  # type: ignore[attr-defined]
        return self.draft_to_target(torch.arange(self.config.draft_vocab_size, device=device))

    def set_draft_vocabulary(self, target_ids: torch.Tensor) -> None:
        """Choose the Vd target ids that the head proposes (before training).

        Raises:
            ValueError: not reduced, or not Vd different ids below V.
        """
        if not self.config.has_reduced_vocab:
            raise ValueError("draft_vocab_size equals vocab_size; make the head with a smaller one to choose ids")
        ids = target_ids.to(self.d2t.device, torch.int64).sort().values
        self._check_draft_ids(ids)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))

    def _check_draft_ids(self, ids: torch.Tensor) -> None:
        size = self.config.vocab_size
        if ids.shape != self.d2t.shape or bool((ids < 0).any() | (ids >= size).any() | (ids.diff() <= 0).any()):
            raise ValueError(
                f"the draft vocabulary must be {self.d2t.shape[0]} ascending target ids below {size}, kept as offsets "
                "(target id = draft id + d2t[draft id]); save offsets, not absolute ids"
            )
