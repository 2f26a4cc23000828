"""Where a block is cut: at the first token that falls below the threshold, whatever stands behind it."""

from __future__ import annotations

import pytest
import torch

from specdec_hf.policies import confident_lengths

CONFIDENCE = torch.tensor([[0.9, 0.4, 0.9, 0.9], [0.5, 0.5, 0.5, 0.1], [0.2, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]])


@pytest.mark.parametrize(
    ("threshold", "expected"), [(0.5, [1, 3, 0, 4]), (0.95, [0, 0, 0, 0]), (0.1, [4, 4, 4, 4]), (0.4, [4, 3, 0, 4])]
)
def test_cut_at_the_first_low_confidence(threshold, expected):
    assert confident_lengths(CONFIDENCE, [4, 4, 4, 4], threshold) == expected
    assert confident_lengths(CONFIDENCE, [2, 0, 4, 3], threshold) == [
        min(length, limit) for length, limit in zip(expected, [2, 0, 4, 3], strict=True)
    ]


def test_nan_cuts():
    assert confident_lengths(torch.tensor([[0.9, float("nan"), 0.9]]), [3], 0.1) == [1]


def test_token_k_does_not_depend_on_what_follows():
    """Changing the confidence of later tokens never changes whether an earlier one stays."""
    changed = CONFIDENCE.clone()
    changed[:, 2:] = torch.rand(4, 2)
    for before, after in zip(
        confident_lengths(CONFIDENCE, [4] * 4, 0.5), confident_lengths(changed, [4] * 4, 0.5), strict=True
    ):
        assert min(before, 2) == min(after, 2)
