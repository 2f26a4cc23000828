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
    "EarlyExitConfig": "heads.early_exit",
    "EarlyExitHead": "heads.early_exit",
    "MedusaConfig": "heads.medusa",
    "MedusaHead": "heads.medusa",
    "SpeculationStats": "output",
    "SpeculativeConfig": "options",
    "SpeculativeGenerationMixin": "generation",
    "SpeculativeModelForCausalLM": "generation",
    "disable_speculation": "generation",
    "enable_speculation": "generation",
    "install": "generation",
    "last_speculation": "generation",
    "pack_linears": "packing",
    "speculative_decoding": "generation",
    "uninstall": "generation",
    "unpack_linears": "packing",
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:  # for type checkers and editors, which do not run __getattr__; a test compares it with _WHERE
    from .generation import SpeculativeGenerationMixin as SpeculativeGenerationMixin
    from .generation import SpeculativeModelForCausalLM as SpeculativeModelForCausalLM
    from .generation import disable_speculation as disable_speculation
    from .generation import enable_speculation as enable_speculation
    from .generation import install as install
    from .generation import last_speculation as last_speculation
    from .generation import speculative_decoding as speculative_decoding
    from .generation import uninstall as uninstall
    from .heads.dspark import DSparkConfig as DSparkConfig
    from .heads.dspark import DSparkDraftModel as DSparkDraftModel
    from .heads.early_exit import EarlyExitConfig as EarlyExitConfig
    from .heads.early_exit import EarlyExitHead as EarlyExitHead
    from .heads.medusa import MedusaConfig as MedusaConfig
    from .heads.medusa import MedusaHead as MedusaHead
    from .options import SpeculativeConfig as SpeculativeConfig
    from .output import SpeculationStats as SpeculationStats
    from .packing import pack_linears as pack_linears
    from .packing import unpack_linears as unpack_linears


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
