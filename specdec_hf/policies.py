"""How much to draft and how much of it to verify.

A policy decides from what is known *before* a token is drawn: the confidence of token k depends on the tokens before
it and never on token k itself (reference: DSpark, section on confidence-scheduled verification), so cutting a block where
confidence falls leaves the output distribution exactly the target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: Values of `num_assistant_tokens_schedule`.
SCHEDULES = ("constant",)


def confident_lengths(confidence: Tensor, lengths: list[int], threshold: float) -> list[int]:
    """Cut each row's block at the first token whose confidence is below the threshold.

    Args:
        confidence: float32 [B, K] in [0, 1], the probability that token k survives given that the ones before do.
        lengths: drafted tokens of each row.
        threshold: in [0, 1]; 0 keeps all.

    Returns:
        The new lengths (0 = verify the anchor alone). Waits for the device once.
    """
    kept = (confidence >= threshold).long().cumprod(dim=1).sum(dim=1).tolist()
    return [min(own, length) for own, length in zip(kept, lengths, strict=True)]
