"""Linear layers that read a block of tokens as cheaply as the CPU can: weights packed once instead of in every call.

On x86 CPUs torch's float32 matrix product rearranges the whole weight in each call that has 2 or more rows, and where
the processor only emulates bfloat16 its product costs as much as all rows one by one. Verifying a block would then cost
two to six plain steps. `pack_linears` keeps a rearranged copy of every `nn.Linear`, of one of two kinds:

- *Half*: FBGEMM's float16 layout, read as float16 and multiplied in float32. Only for weights that float16 holds: those
  of bfloat16 checkpoints do, in bfloat16 or loaded as float32, since a power of two that brings the largest weight into
  range leaves only weights below 2^-31 of it to be rounded. Costs half the memory of a float32 weight and reads half.
- *Float32*: oneDNN's blocked layout, for all other float32 weights.

A single row of the target (a plain step) goes on as before; a draft head knows no plain steps and uses its copies for
single rows too. Results differ from the unpacked ones by the rounding of sums only.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from .hardware import emulates_bfloat16

#: Rows for which oneDNN's copy is used, and for which it is laid out. FBGEMM's copy serves any number from 2.
_ROWS, _TYPICAL = range(2, 17), 8
#: Largest rounding error of a packed weight, as a part of the largest weight: far below float32's own (2^-24).
_EXACT = 2.0**-36
#: The same for a bfloat16 weight that is packed without a factor: far below the rounding of its results (2^-9).
_FINE = 2.0**-20
_HALF_MAX = 65504.0
#: FBGEMM's engine goes by these names in torch.
_ENGINES = ("x86", "fbgemm")


def can_pack() -> bool:
    """Whether this build of torch has packed linear layers (x86 builds do). Their operators are private names."""
    return _has_float32_kind() or _has_half_kind()


def packs_bfloat16() -> bool:
    """Whether bfloat16 layers can be packed here, which makes bfloat16 blocks cheap on processors that emulate it."""
    return _has_half_kind()


def _has_float32_kind() -> bool:
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


@functools.cache
def _has_half_kind() -> bool:
    if torch.backends.quantized.engine not in _ENGINES or not all(
        hasattr(torch.ops.quantized, name) for name in ("linear_prepack_fp16", "linear_dynamic_fp16")
    ):
        return False
    try:  # a processor without the instructions refuses only when asked
        probe = torch.ops.quantized.linear_prepack_fp16(torch.eye(8), None)
        return bool(torch.equal(torch.ops.quantized.linear_dynamic_fp16(torch.eye(8), probe), torch.eye(8)))
    except RuntimeError:
        return False


def half_scale(weight: Tensor) -> float | None:
    """The power of two with which float16 holds a weight (see the module), or None if it does not.

    Args:
        weight: [N, D], read in slices, so that no whole copy is made. Float32: it must come out exactly, but for
            `_EXACT`. Bfloat16: the factor is 1 if that leaves errors far below the rounding of bfloat16's own results.
    """
    if weight.numel() == 0:
        return None
    low, high = weight.aminmax()
    largest = max(-float(low), float(high))
    if not 0.0 < largest < math.inf:
        return None
    if weight.dtype == torch.bfloat16 and largest < _HALF_MAX and _holds(weight, 1.0, _FINE * largest):
        return 1.0
    scale = 2.0 ** (14 - math.floor(math.log2(largest)))
    return scale if _holds(weight, scale, _EXACT * largest) else None


def _holds(weight: Tensor, scale: float, error: float) -> bool:
    """Whether float16 holds `weight * scale` up to `error * scale`. A weight that does not shows it early as a rule."""
    for rows in (weight[:1], *weight[1:].split(1024)):
        wide = rows.float() * scale
        if rows.numel() and float((wide.half().float() - wide).abs().max()) > error * scale:
            return False
    return True


class _PackedForward:
    """Takes the place of one layer's `forward`. Packs at the first block, and again if weight or bias has changed.

    Args:
        module: the layer.
        scale: for the half kind, see `half_scale`; None = float32 kind.
        least: fewest rows that the half kind is used for, 1 or 2.
    """

    def __init__(self, module: nn.Linear, scale: float | None, least: int) -> None:
        self.module = module
        self.scale = scale
        self.least = least
        self.packed: Any = None
        self.key: Any = _key(module)

    def __call__(self, inputs: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        rows = inputs.numel() // inputs.shape[-1]
        if rows < self.least or torch.is_grad_enabled() or inputs.dtype != weight.dtype or not _fits(weight):
            return nn.functional.linear(inputs, weight, bias)
        if (key := _key(self.module)) != self.key:
            self.packed, self.key, self.scale = None, key, _scale(weight)
        if self.scale is not None:
            return self._half(inputs, weight, bias, self.scale)
        if rows not in _ROWS or weight.dtype != torch.float32 or not _has_float32_kind():
            return nn.functional.linear(inputs, weight, bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL)
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, bias, "none", [], "")

    def _half(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        if self.packed is None:
            wide = [None if part is None else part.detach().float() * scale for part in (weight, bias)]
            self.packed = torch.ops.quantized.linear_prepack_fp16(*wide)
        result = torch.ops.quantized.linear_dynamic_fp16(inputs.float(), self.packed)
        return (result if scale == 1.0 else result.mul_(1 / scale)).to(inputs.dtype)

    def __getstate__(self) -> dict[str, Any]:  # copied or pickled: the copy packs its own weight
        return self.__dict__ | {"packed": None, "key": None}


def _key(module: nn.Linear) -> tuple[tuple[int, int], ...]:
    parts = (module.weight,) if module.bias is None else (module.weight, module.bias)
    return tuple((part.data_ptr(), 0 if part.is_inference() else part._version) for part in parts)


def _fits(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and type(weight) in (nn.Parameter, Tensor)
    return plain and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and emulates_bfloat16()))


def _scale(weight: Tensor) -> float | None:
    return half_scale(weight.detach()) if _has_half_kind() else None


def pack_linears(model: nn.Module) -> int:
    """Give every plain `nn.Linear` of a model on the CPU a packed copy of its weight, made at its first block.

    Float32 layers, and bfloat16 ones on processors that emulate bfloat16 (see `hardware.emulates_bfloat16`).

    Args:
        model: target or draft head; changed in place. Quantised and adapted layers are left alone.

    Returns:
        Bytes that the packed copies will take; 0 where nothing can be (no such layers, or see `can_pack`).
    """
    if not can_pack():
        return 0
    least = 1 if hasattr(getattr(model, "config", None), "speculative_strategy") else 2
    size = 0
    for module in model.modules():
        if type(module) is not nn.Linear or not _fits(module.weight):
            continue
        wrapper = module.__dict__.get("forward")
        if wrapper is None:
            scale = _scale(module.weight)
            if scale is None and (module.weight.dtype != torch.float32 or not _has_float32_kind()):
                continue
            wrapper = module.forward = _PackedForward(module, scale, least)  # type: ignore[assignment]
        if isinstance(wrapper, _PackedForward):  # else somebody else's wrapper, e.g. accelerate's
            size += module.weight.numel() * (4 if wrapper.scale is None else 2)
    return size


def is_packed(layer: nn.Module) -> bool:
    """Whether `pack_linears` has given this layer a packed copy (made, or to be made at its first block)."""
    return isinstance(layer.__dict__.get("forward"), _PackedForward)


def unpack_linears(model: nn.Module) -> None:
    """Undo `pack_linears`; harmless on a model that never had it."""
    for module in model.modules():
        if is_packed(module):
            del module.__dict__["forward"]
