"""Draft heads: one file a head, config and model together, loaded on first use.

``specdec_hf.heads.DSparkDraftModel`` imports torch and transformers only when it is asked for. Importing a head's
module registers it with ``AutoConfig`` and ``AutoModel``.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "DSparkConfig": "dspark",
    "DSparkDraftModel": "dspark",
    "DSparkOutput": "dspark",
    "DraftContext": "dspark",
    "EarlyExitConfig": "early_exit",
    "EarlyExitHead": "early_exit",
    "MedusaConfig": "medusa",
    "MedusaHead": "medusa",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_WHERE))}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
