"""Drafting strategies: one file a strategy, the file's name is the strategy's name.

A new file is found without being listed anywhere; it holds one `Drafter` subclass.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from ..options import SpeculativeConfig, did_you_mean
from .base import Drafter


def available() -> list[str]:
    """Names of all strategies."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base" and not m.name.startswith("_"))


def drafter_class(name: str) -> type[Drafter]:
    """The class that implements a strategy.

    Raises:
        ValueError: no such strategy; the message lists what there is.
    """
    if name not in available():
        raise ValueError(
            f"speculative={name!r} is not a strategy{did_you_mean(name, available())}. There are: "
            f"{', '.join(available())}."
        )
    module = importlib.import_module(f"{__name__}.{name}")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Drafter) and value.__module__ == module.__name__
    )


def resolve(config: SpeculativeConfig, head: Any, target: Any) -> Drafter:
    """The drafter for one call. Raises what the strategy's `create` raises."""
    assert config.strategy is not None
    return drafter_class(config.strategy).create(head, target, config)
