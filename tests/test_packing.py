"""Packed linear layers: equal results, used for blocks only, never stale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from specdec_hf import packing

pytestmark = pytest.mark.skipif(not packing.can_pack(), reason="this build of torch has no packed linear layer")


def packed_layer(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    plain = nn.Linear(32, 48, bias=bias)
    layer = copy.deepcopy(plain)
    assert packing.pack_linears(layer) == 32 * 48 * 4
    return plain, layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 2, 32), (5, 32), (2, 8, 32), (1, 1, 32), (1, 40, 32)])
def test_the_same_result_for_any_number_of_rows(shape: tuple[int, ...], bias: bool) -> None:
    plain, layer = packed_layer(bias)
    inputs = torch.randn(shape)
    with torch.no_grad():
        assert torch.allclose(layer(inputs), plain(inputs), atol=1e-5)
    assert (layer.forward.packed is not None) == (2 <= inputs.numel() // 32 <= 16)


def test_a_changed_weight_is_packed_again() -> None:
    plain, layer = packed_layer()
    inputs = torch.randn(4, 32)
    with torch.no_grad():
        layer(inputs)
        layer.weight.mul_(2.0)
        plain.weight.mul_(2.0)
        assert torch.allclose(layer(inputs), plain(inputs), atol=1e-5)
        layer.weight = nn.Parameter(plain.weight * 3)
        plain.weight.mul_(3.0)
        assert torch.allclose(layer(inputs), plain(inputs), atol=1e-5)


def test_gradients_and_other_types_go_the_usual_way() -> None:
    _, layer = packed_layer()
    layer(torch.randn(4, 32)).sum().backward()
    assert layer.weight.grad is not None and layer.forward.packed is None
    double = nn.Linear(32, 48).double()
    assert packing.pack_linears(double) == 0 and "forward" not in double.__dict__


@pytest.mark.parametrize("emulates", [True, False])
def test_bfloat16_is_packed_only_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch, emulates: bool) -> None:
    monkeypatch.setattr(packing, "_emulates_bfloat16", lambda: emulates)
    layer = nn.Linear(32, 48).bfloat16()
    plain = copy.deepcopy(layer)
    assert packing.pack_linears(layer) == (32 * 48 * 4 if emulates else 0)
    inputs = torch.randn(4, 32).bfloat16()
    with torch.no_grad():
        result, expected = layer(inputs), plain(inputs)
        exact = plain.float()(inputs.float())
    assert result.dtype == torch.bfloat16 and torch.allclose(result.float(), expected.float(), atol=0.03)
    # one rounding, of the result: no worse than the emulated product
    assert (result.float() - exact).abs().max() <= (expected.float() - exact).abs().max() + 1e-3


def test_unpacking_leaves_no_trace_and_copies_stand_alone() -> None:
    plain, layer = packed_layer()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        assert torch.allclose(layer(torch.ones(2, 32)), plain(torch.ones(2, 32)), atol=1e-5)
        assert torch.allclose(other(torch.ones(2, 32)), other.bias.expand(2, -1))
    packing.unpack_linears(layer)
    assert "forward" not in layer.__dict__


def test_generation_is_the_same_with_packed_target_and_head(tiny_target: Any) -> None:
    from specdec_hf import DSparkConfig, DSparkDraftModel, enable_speculation, last_speculation

    target = enable_speculation(tiny_target("llama"))
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, block_size=4, num_hidden_layers=1)).eval()
    ids = torch.arange(3, 12)[None]
    expected = target.generate(ids, max_new_tokens=16, do_sample=False)
    assert packing.pack_linears(target) > 0 and packing.pack_linears(head) > 0
    assert torch.equal(target.generate(ids, assistant_model=head, max_new_tokens=16, do_sample=False), expected)
    assert last_speculation(target).rounds > 0
    assert any(
        isinstance(module.__dict__.get("forward"), packing._PackedForward) and module.forward.packed is not None
        for module in target.modules()
    )
