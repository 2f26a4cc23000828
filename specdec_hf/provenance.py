"""Where a figure comes from: command, commit, versions, machine. Rank 0."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from .hardware import processor_name

_PACKAGES = ("specdec_hf", "torch", "transformers", "safetensors", "tokenizers")


def provenance(**settings: Any) -> dict[str, Any]:
    """A JSON-ready record of what produced a result.

    Args:
        settings: what was measured with: dtype, threads, seed, prompts, ...

    Returns:
        `command`, `date` (UTC), `commit` (None outside a checkout), `versions`, `machine`, and the settings.
    """
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": {"processor": processor_name(), "cores": os.cpu_count(), "system": platform.system()},
        **settings,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
