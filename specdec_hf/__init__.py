"""Speculative decoding for Hugging Face transformers: the same output from ``generate()``, in fewer target forwards.

Importing this package imports neither torch nor transformers; each public name is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "DSparkConfig": "heads.dspark",
    "DSparkDraftModel": "heads.dspark",
    "SpeculationStats": "output",
    "SpeculativeConfig": "options",
    "SpeculativeGenerationMixin": "generation",
    "SpeculativeModelForCausalLM": "generation",
    "disable_speculation": "generation",
    "enable_speculation": "generation",
    "install": "generation",
    "last_speculation": "generation",
    "speculative_decoding": "generation",
    "uninstall": "generation",
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:  # for type checkers and editors, which do not run __getattr__; a test compares it with _WHERE
    from .generation import (
        SpeculativeGenerationMixin,
        SpeculativeModelForCausalLM,
        disable_speculation,
        enable_speculation,
        install,
        last_speculation,
        speculative_decoding,
        uninstall,
    )
    from .heads.dspark import DSparkConfig, DSparkDraftModel
    from .options import SpeculativeConfig
    from .output import SpeculationStats


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
        globals()[name] = value  # the next access does not come here
        return value
    if name.startswith("__"):  # tools probe for these; a suggestion would be noise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import difflib

    near = difflib.get_close_matches(name, _WHERE, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {hint}It has {', '.join(sorted(_WHERE))}.")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
