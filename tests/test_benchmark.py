"""`specdec bench`: the figures are those of the calls, and they carry their provenance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_hf import DSparkConfig, DSparkDraftModel
from specdec_hf.benchmark import RoundCost, measure, table, write_json
from specdec_hf.hardware import block_cost, emulates_bfloat16, fast_dtype, processor_name


def test_measure_reports_every_context(tiny_target: Any) -> None:
    target = tiny_target("llama")
    head = DSparkDraftModel(DSparkConfig.for_target(target.config, block_size=3, num_hidden_layers=1)).eval()
    before = torch.get_num_threads()
    results = measure(target, head, [5, 20], new_tokens=8, repeats=1, threads=1)
    assert torch.get_num_threads() == before
    assert [cost.context for cost in results] == [5, 20]
    for cost in results:
        assert cost.plain_step > 0 and cost.draft > 0 and cost.target > 0 and 0 < cost.other_share < 1
        assert 1.0 <= cost.accepted_length <= 4.0
    assert "from 5 to 20 tokens" in table(results)


def test_a_median_needs_steps(tiny_target: Any) -> None:
    with pytest.raises(ValueError, match=r"new_tokens=4.*at least 8"):
        measure(tiny_target("llama"), None, [5], new_tokens=4)


def test_json_says_where_the_figures_come_from(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_json([RoundCost(128, 10.0, 2.0, 12.0, 1.0, 1.5)], path, dtype="float32", threads=1)
    written = json.loads(path.read_text())
    assert written["rounds"][0]["round"] == 15.0 and written["rounds"][0]["other_share"] == pytest.approx(1 / 15)
    assert written["provenance"]["versions"]["torch"] == torch.__version__
    assert (
        written["provenance"]["dtype"] == "float32"
        and written["provenance"]["machine"]["processor"] == processor_name()
    )


def test_the_number_type_follows_what_a_block_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.3 < block_cost("float32", rows=2) < 20  # a ratio of two timings, not a time
    for cost, dtype in ((7.5, "float32"), (1.3, "bfloat16")):
        monkeypatch.setattr("specdec_hf.hardware.block_cost", lambda dtype, cost=cost: cost)
        emulates_bfloat16.cache_clear()
        assert fast_dtype("cpu") == dtype and fast_dtype("cuda") == "bfloat16"
        assert fast_dtype("cpu", packed=True) == "bfloat16"
    emulates_bfloat16.cache_clear()
