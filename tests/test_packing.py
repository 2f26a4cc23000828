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


half_kind = pytest.mark.skipif(not packing.packs_bfloat16(), reason="this build of torch has no FBGEMM")


@half_kind
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", [2.0**-30, 2.0**-7, 1.0, 2.0**20])
def test_float32_weights_of_a_bfloat16_checkpoint_lose_nothing_in_half_the_memory(factor: float, bias: bool) -> None:
    layer = nn.Linear(64, 48, bias=bias)
    with torch.no_grad():
        spread = torch.randn(48, 64) * 10.0 ** torch.randint(-4, 1, (48, 64))
        layer.weight.copy_(spread.bfloat16().float() * factor)
        plain = copy.deepcopy(layer).double()
        assert packing.pack_linears(layer) == 48 * 64 * 2
        for rows in (2, 6, 40):
            inputs = torch.randn(rows, 64)
            exact = plain(inputs.double())
            own = (layer(inputs) - exact).abs().max()
            usual = (nn.functional.linear(inputs, layer.weight, layer.bias) - exact).abs().max()
            assert own <= 4 * usual, (rows, own, usual)  # the rounding of float32 sums, not that of float16 weights
        assert layer.forward.packed is not None and layer.forward.scale is not None


@half_kind
def test_weights_that_float16_does_not_hold_stay_float32() -> None:
    weight = torch.randn(8, 8)
    assert packing.half_scale(weight) is None  # 24 bits of mantissa
    coarse = weight.bfloat16().float()
    assert packing.half_scale(coarse) is not None
    late = coarse.repeat(200, 1)
    late[-1, -1] = 1 / 3
    assert packing.half_scale(late) is None
    for broken in (coarse * 0, coarse * float("inf"), coarse[:0]):
        assert packing.half_scale(broken) is None
    wide = coarse.clone()
    wide[0, 0], wide[1, 1] = 2.0**30, 2.0**-5 * (1 + 2.0**-7)
    assert packing.half_scale(wide) is not None  # loses 2^-42 of the largest weight, which float32 sums lose too
    wide[0, 0], wide[1, 1] = 2.0**20, 1 / 3
    assert packing.half_scale(wide) is None


@half_kind
def test_a_bfloat16_weight_is_packed_as_it_is_or_scaled() -> None:
    assert packing.half_scale(torch.randn(16, 16).bfloat16()) == 1.0
    scale = packing.half_scale(torch.randn(16, 16).bfloat16() * 2.0**-20)
    assert scale is not None and scale > 2.0**30


@half_kind
def test_a_head_uses_its_copies_for_single_rows_and_a_target_does_not(tiny_target: Any) -> None:
    from specdec_hf import DSparkConfig, DSparkDraftModel

    target = tiny_target("llama")
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, block_size=4, num_hidden_layers=1)).eval()
    for model in (target, head):
        model.bfloat16().float()
        packing.pack_linears(model)
    with torch.no_grad():
        target.lm_head(torch.zeros(1, target.config.hidden_size))
        head.markov_head.markov_w2(torch.zeros(1, head.config.markov_rank))
    assert target.lm_head.forward.packed is None and head.markov_head.markov_w2.forward.packed is not None


@half_kind
@pytest.mark.parametrize("emulates", [True, False])
def test_bfloat16_is_packed_only_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch, emulates: bool) -> None:
    monkeypatch.setattr(packing, "emulates_bfloat16", lambda: emulates)
    layer = nn.Linear(32, 48).bfloat16()
    plain = copy.deepcopy(layer)
    assert packing.pack_linears(layer) == (32 * 48 * 2 if emulates else 0)
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


def test_a_packed_model_can_be_saved_and_copied(tmp_path: Any) -> None:
    _, layer = packed_layer()
    with torch.no_grad():
        layer(torch.randn(4, 32))
        torch.save(layer, tmp_path / "layer.pt")
        loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
        inputs = torch.randn(4, 32)
        assert torch.equal(loaded(inputs), layer(inputs))
        assert torch.equal(copy.deepcopy(layer)(inputs), layer(inputs))


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
