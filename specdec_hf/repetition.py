"""Where a text begins to repeat itself. Rank 0.

Small models that decode greedily end in loops, and a loop is easy to draft: counted with the rest it inflates the
accepted length and the speed-up. Figures are therefore taken from the text before it.
"""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 4
"""Tokens of the pieces that are compared."""
RUN = 16
"""So many repeated pieces in a row are a repetition; they copy ``RUN + GRAM - 1`` = 19 tokens word for word."""

RULE = (
    f"A text is cut where it begins to repeat itself: at the first run of {RUN} {GRAM}-grams in a row that all "
    f"occurred earlier in the same answer ({RUN + GRAM - 1} tokens copied word for word); the copy is left out."
)
"""The definition in words, for reports."""


def repeats_from(tokens: Sequence[int]) -> int:
    """How many leading tokens to keep: all before the first run of repeated 4-grams, or all there are.

    A 4-gram is repeated if the same four ids occurred before in ``tokens`` (overlapping it or not), so loops of any
    period are found. The run's own first 4-gram is the first that is left out.

    Args:
        tokens: ids of one answer, prompt not included.
    """
    seen: set[tuple[int, ...]] = set()
    run = 0
    for start in range(len(tokens) - GRAM + 1):
        gram = tuple(tokens[start : start + GRAM])
        run = run + 1 if gram in seen else 0
        seen.add(gram)
        if run == RUN:
            return start - RUN + 1
    return len(tokens)
