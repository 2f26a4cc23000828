"""Stopping criteria inside a committed run: every committed token is judged, as if it had come alone.

The criteria transformers makes itself are recognised by their class and judged on the host (end-of-sequence ids,
lengths, the clock) or per row (stop strings). Any other criterion may look at the whole batch and keep state, so it
must be called as plain decoding calls it; decoding then judges one position at a time (`StoppingRules.in_order` tells).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._hf import stopping


class StoppingRules:
    """The stopping criteria of one `generate()` call.

    Args:
        criteria: the prepared `StoppingCriteriaList`.
        batch_size: rows B.
    """

    def __init__(self, criteria: Any, batch_size: int) -> None:
        self.criteria = criteria
        self.max_length: int = criteria.max_length if criteria.max_length is not None else 2**62
        self.eos_ids: set[int] = set()
        self._clocks: list[Any] = []
        self._row_rules: list[Any] = []
        unknown = False
        for rule in criteria:
            if type(rule) is stopping.EosTokenCriteria:
                self.eos_ids.update(rule.eos_token_id.flatten().tolist())
            elif type(rule) is stopping.MaxTimeCriteria:
                self._clocks.append(rule)
            elif type(rule) is stopping.StopStringCriteria:
                self._row_rules.append(rule)
            elif type(rule) is not stopping.MaxLengthCriteria:
                unknown = True
        #: plain decoding pads finished rows only if some criterion names end-of-sequence ids
        self.pads_finished_rows = any(hasattr(rule, "eos_token_id") for rule in criteria)
        # Without such ids, rows that a stop string or the clock ends go on growing until the last row ends.
        rows_wait = batch_size > 1 and not self.pads_finished_rows and bool(self._row_rules or self._clocks)
        self.in_order = unknown or rows_wait

    def judge(self, ids: Tensor, row: int, length: int, tokens: list[int]) -> tuple[int, bool]:
        """How many of a row's new tokens stand before and including the first stop.

        Args:
            ids: LongTensor [B, capacity]; `tokens` already stand in `ids[row, length:]`.
            row: which row.
            length: tokens of the row before `tokens`.
            tokens: the new tokens.

        Returns:
            (tokens to keep, whether the row has ended).
        """
        for kept, token in enumerate(tokens, start=1):
            if token in self.eos_ids or length + kept >= self.max_length:
                return kept, True
            if not (self._clocks or self._row_rules):
                continue
            prefix = ids[row : row + 1, : length + kept]
            if any(bool(rule(prefix, None).any()) for rule in (*self._clocks, *self._row_rules)):
                return kept, True
        return len(tokens), False
