"""What this machine's processor is, and in which number type it verifies blocks cheaply. Rank 0."""

from __future__ import annotations

import functools
import platform
import statistics
import time
from pathlib import Path

#: Rows of one verified block, and how many times one row's cost they may have before a type counts as slow.
_ROWS, _SLOW = 8, 4.0


def processor_name() -> str:
    """The processor's own name, with the widest vector instructions that matter here; the architecture if unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    best = next((flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags), "")
    return f"{names[0] if names else platform.machine()} {best}".strip()


def block_cost(dtype: str, rows: int = _ROWS) -> float:
    """How many times as long a linear layer takes for a block as for one token, on the CPU, in a few milliseconds.

    About 1 to 2 where the processor computes in that type; about `rows` where it only emulates it (bfloat16 on x86
    processors without AVX512-BF16 or AMX), and then no accepted length can pay for a block.

    Args:
        dtype: `"bfloat16"`, `"float32"` or `"float16"`.
        rows: tokens of the block.
    """
    import torch

    weight = torch.ones(2048, 1024, dtype=getattr(torch, dtype))

    def seconds(count: int) -> float:
        tokens, times = torch.ones(count, 1024, dtype=weight.dtype), []
        for _ in range(9):
            start = time.perf_counter()
            torch.nn.functional.linear(tokens, weight)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    return seconds(rows) / seconds(1)


@functools.cache
def emulates_bfloat16() -> bool:
    """Whether this processor only emulates bfloat16, so that a block costs nearly as much as its tokens one by one."""
    return block_cost("bfloat16") > _SLOW


def fast_dtype(device: str, packed: bool = False) -> str:
    """The number type to decode in.

    Args:
        device: `"cpu"`, `"cuda"`, ...
        packed: whether linear layers will be packed for blocks (see packing.py), which does without emulation.

    Returns:
        `"bfloat16"`, or `"float32"` on a CPU that would have to emulate bfloat16 blocks.
    """
    return "float32" if device == "cpu" and not packed and emulates_bfloat16() else "bfloat16"
