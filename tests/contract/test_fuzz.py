"""A small fixed part of the random calls in `fuzzing.py`; that file says how to run more."""

from __future__ import annotations

import fuzzing
import pytest


@pytest.mark.parametrize("number", range(30))
@pytest.mark.filterwarnings("ignore")
def test_random_calls(number: int) -> None:
    found, described = fuzzing.differences(number)
    assert found == [], described
