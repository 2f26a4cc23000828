"""Linear layers that read a block of tokens as cheaply as the CPU can: weights packed once instead of in every call.

On x86 CPUs torch's float32 matrix product rearranges the whole weight in each call that has 2 or more rows, so
verifying a block costs about twice a plain step. `pack_linears` keeps a rearranged copy (oneDNN's blocked layout) of
every `nn.Linear` and uses it for 2 to 16 rows; a single row (a plain step) and long prompts go on as before. It costs
as much memory again as the packed weights, twice as much for bfloat16 ones. Results differ from the unpacked ones by
rounding only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .hardware import fast_dtype

#: Rows for which the packed copy is used, and for which it is laid out.
_ROWS, _TYPICAL = range(2, 17), 8


def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed linear layer (x86 builds do). Its operators are private names."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


class _PackedForward:
    """Takes the place of one layer's `forward`. Packs at the first block, and again if the weight has changed."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self.packed: Tensor | None = None
        self.key = (0, 0)

    def __call__(self, inputs: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        rows = inputs.numel() // inputs.shape[-1]
        if rows not in _ROWS or torch.is_grad_enabled() or inputs.dtype != weight.dtype or not _fits(weight):
            return nn.functional.linear(inputs, weight, bias)
        key = (weight.data_ptr(), weight._version)
        if self.packed is None or key != self.key:
            self.packed, self.key = torch.ops.mkldnn._reorder_linear_weight(weight.detach().float(), _TYPICAL), key
        wide = None if bias is None else bias.float()
        return torch.ops.mkldnn._linear_pointwise(inputs.float(), self.packed, wide, "none", [], "").to(inputs.dtype)


def _fits(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and type(weight) in (nn.Parameter, Tensor)
    return plain and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _emulates_bfloat16()))


@functools.cache
def _emulates_bfloat16() -> bool:
    return fast_dtype("cpu") != "bfloat16"


def pack_linears(model: nn.Module) -> int:
    """Give every plain `nn.Linear` of a model on the CPU a packed copy of its weight, made at its first block.

    Float32 layers, and bfloat16 ones on processors that emulate bfloat16 (see `hardware.fast_dtype`): their copy is
    float32, since a block costs less that way than by emulation.

    Args:
        model: target or draft head; changed in place. Quantised and adapted layers are left alone.

    Returns:
        Bytes that the packed copies will take; 0 where nothing can be (no such layers, or see `can_pack`).
    """
    if not can_pack():
        return 0
    size = 0
    for module in model.modules():
        if type(module) is nn.Linear and _fits(module.weight):
            if not isinstance(module.__dict__.get("forward"), _PackedForward):
                if "forward" in module.__dict__:
                    continue  # somebody else's wrapper, e.g. accelerate's
                module.forward = _PackedForward(module)  # type: ignore[assignment]
            size += module.weight.numel() * 4
    return size


def unpack_linears(model: nn.Module) -> None:
    """Undo `pack_linears`; harmless on a model that never had it."""
    for module in model.modules():
        wrapped: Any = module.__dict__.get("forward")
        if isinstance(wrapped, _PackedForward):
            del module.__dict__["forward"]
