"""What a forward of the target costs on this machine, by the tokens in it: measured once, kept on disk.

The policies that weigh a longer block against its price ask here. The table is for one model, device, number type and
number of threads; the price of a draft is added by the calls that draft. Rank 1: knows no drafter.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .hardware import processor_name
from .packing import is_packed

#: Least and most timed forwards of one size, and the seconds a size after which there are enough.
_LEAST, _MOST, _SECONDS = 3, 9, 0.6
_FORMAT = 2


@dataclass
class CostTable:
    """Seconds of a target forward by the tokens in it (all rows together), and of drafting.

    Args:
        tokens: sizes that were measured, ascending.
        seconds: the median at each.
        drafts: seconds that a round spends on drafting, by the name that the caller gives its drafter.
        path: the file that it is kept in; None = nowhere.
    """

    tokens: list[int]
    seconds: list[float]
    drafts: dict[str, float] = field(default_factory=dict)
    path: Path | None = None

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if not self.tokens or len(self.tokens) != len(self.seconds) or not ascending or min(self.seconds) <= 0:
            raise ValueError(
                f"a cost table of tokens {self.tokens} and seconds {self.seconds}: it needs ascending sizes and as "
                "many positive times; measure it again"
            )

    def target(self, tokens: int) -> float:
        """Seconds of a forward of so many tokens: between two sizes a straight line; more tokens never cost less."""
        cost, sizes = self._rising(), self.tokens
        if len(sizes) == 1 or tokens <= sizes[0]:
            return cost[0]
        right = min(bisect.bisect_left(sizes, tokens), len(sizes) - 1)
        left = right - 1
        slope = (cost[right] - cost[left]) / (sizes[right] - sizes[left])
        return cost[left] + slope * (tokens - sizes[left])

    def _rising(self) -> list[float]:
        highest, rising = 0.0, []
        for seconds in self.seconds:
            highest = max(highest, seconds)
            rising.append(highest)
        return rising

    def add(self, other: CostTable) -> None:
        """Take in the sizes that another table has and this one lacks."""
        known = dict(zip(other.tokens, other.seconds, strict=True)) | dict(zip(self.tokens, self.seconds, strict=True))
        self.tokens, self.seconds = sorted(known), [known[size] for size in sorted(known)]

    def save(self) -> None:
        """Write the table to its file; a file that cannot be written is left out (it is only a cache)."""
        if self.path is None:
            return
        content = {"format": _FORMAT, "tokens": self.tokens, "seconds": self.seconds, "drafts": self.drafts}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(f".{os.getpid()}.tmp")
            unfinished.write_text(json.dumps(content), encoding="utf-8")
            unfinished.replace(self.path)
        except OSError:
            self.path = None

    @classmethod
    def load(cls, path: Path) -> CostTable | None:
        """The table in a file; None if there is none, or none of this format."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                return None
            drafts = {str(name): float(seconds) for name, seconds in content["drafts"].items()}
            return cls([int(n) for n in content["tokens"]], [float(s) for s in content["seconds"]], drafts, path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


_tables: WeakKeyDictionary[Any, dict[str, CostTable]] = WeakKeyDictionary()


def cost_table(model: Any, sizes: list[int], rows: int = 1) -> CostTable:
    """The table of a model, from memory, from disk, or measured now (a second or so for each new size, once).

    Args:
        model: the target.
        sizes: tokens of all rows together that must be in the table; multiples of `rows`.
        rows: rows of the batch that they are measured with.
    """
    key = _key(model)
    tables = _tables.setdefault(model, {})
    if key not in tables:
        path = _folder() / f"{key}.json"
        tables[key] = CostTable.load(path) or CostTable([1], measure(model, [(1, 1)]), path=path)
        tables[key].save()
    table = tables[key]
    if missing := sorted(size for size in sizes if size not in table.tokens):
        # Sizes are weighed against one another, so what else the machine did must not come between them: what is
        # measured later is brought to the table's scale by a single token measured beside it.
        alone, *seconds = measure(model, [(1, 1), *((rows, size // rows) for size in missing)])
        table.add(CostTable(missing, [one * table.target(1) / alone for one in seconds]))
        table.save()
    return table


@torch.no_grad()
def measure(model: Any, shapes: list[tuple[int, int]]) -> list[float]:
    """Median seconds of forwards of (rows, tokens a row), without context, in turn: another load slows them all."""
    device = model.get_input_embeddings().weight.device
    blocks = [torch.ones(rows, width, dtype=torch.long, device=device) for rows, width in shapes]
    times: list[list[float]] = []
    began = time.perf_counter()
    while len(times) <= _LEAST or (len(times) <= _MOST and time.perf_counter() - began < _SECONDS * len(shapes)):
        times.append([_seconds(model, ids, device) for ids in blocks])
    return [statistics.median(turns) for turns in zip(*times[1:], strict=True)]  # the first turn warms up


def _seconds(model: Any, ids: torch.Tensor, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _folder() -> Path:
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "specdec_hf" / "costs"


def _key(model: Any) -> str:
    """A file name that stands for all that the times depend on."""
    config, weight = model.config, model.get_input_embeddings().weight
    device = torch.cuda.get_device_name(weight.device) if weight.device.type == "cuda" else processor_name()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    packed = sum(is_packed(module) for module in linears)
    parts = [
        type(model).__name__, config.to_json_string(use_diff=False), sum(p.numel() for p in model.parameters()),
        weight.device.type, device, str(weight.dtype), torch.get_num_threads(), len(linears), packed,
        torch.__version__,
    ]  # fmt: skip
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:24]
