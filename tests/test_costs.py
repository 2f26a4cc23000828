"""The table of what a forward costs: lines between sizes, kept on disk, one for each state of a model."""

from __future__ import annotations

import pytest
import torch

from specdec_hf import costs, pack_linears
from specdec_hf.costs import CostTable, cost_table


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "_folder", lambda: tmp_path)
    monkeypatch.setattr(costs, "_SECONDS", 0.0)
    return tmp_path


def test_lines_between_sizes_and_never_cheaper():
    table = CostTable([1, 2, 6, 8], [1.0, 3.0, 2.0, 4.0])
    assert [table.target(n) for n in (0, 1, 2, 4, 6, 7, 8, 10)] == [1.0, 1.0, 3.0, 3.0, 3.0, 3.5, 4.0, 5.0]
    assert CostTable([4], [2.0]).target(100) == 2.0


@pytest.mark.parametrize(("tokens", "seconds"), [([], []), ([1, 2], [1.0]), ([2, 1], [1.0, 1.0]), ([1], [0.0])])
def test_nonsense_is_refused(tokens, seconds):
    with pytest.raises(ValueError, match="measure it again"):
        CostTable(tokens, seconds)


def test_measured_once_and_kept(tiny_target, folder, monkeypatch):
    target, calls = tiny_target(), []
    real = costs.measure
    monkeypatch.setattr(costs, "measure", lambda *args: calls.append(args[1]) or real(*args))
    table = cost_table(target, [2, 6], rows=2)
    assert calls == [[(1, 1)], [(1, 1), (2, 1), (2, 3)]] and table.tokens == [1, 2, 6]
    table.drafts["x"] = 0.25
    table.save()
    assert cost_table(target, [2, 6], rows=2) is table and len(calls) == 2
    again = cost_table(tiny_target(), [2, 6], rows=2)  # another object, the same model
    assert len(calls) == 2 and again.seconds == table.seconds and again.drafts == {"x": 0.25}
    assert len(list(folder.iterdir())) == 1


def test_a_busier_machine_does_not_bend_the_table(tiny_target, folder, monkeypatch):
    """Sizes that are added later are brought to the table's own scale by a step measured beside them."""
    target, load = tiny_target(), 1.0
    monkeypatch.setattr(costs, "measure", lambda model, shapes: [load * (1 + rows * width) for rows, width in shapes])
    cost_table(target, [1, 4])
    load = 3.0
    table = cost_table(target, [2, 8], rows=2)
    assert dict(zip(table.tokens, table.seconds, strict=True)) == {1: 2.0, 2: 3.0, 4: 5.0, 8: 9.0}


def test_sizes_are_timed_in_turn(tiny_target, monkeypatch):
    order = []
    monkeypatch.setattr(costs, "_seconds", lambda model, ids, device: order.append(ids.numel()) or 1.0 * len(order))
    assert costs.measure(tiny_target(), [(1, 1), (2, 3)]) == [5.0, 6.0]
    assert order == [1, 6] * 4


def test_another_state_of_the_model_is_another_table(tiny_target, folder, monkeypatch):
    target = tiny_target()
    first = cost_table(target, [1])
    pack_linears(target)
    assert cost_table(target, [1]) is not first
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    cost_table(target, [1])
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1}', '{"format": 0}', '{"format": 1, "tokens": 3}'])
def test_a_damaged_file_is_measured_anew(content, tiny_target, folder):
    target = tiny_target()
    (folder / f"{costs._key(target)}.json").write_text(content)
    assert cost_table(target, [1]).target(1) > 0


def test_a_folder_that_cannot_be_written(tiny_target, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(costs, "_folder", lambda: tmp_path / "file")
    assert cost_table(tiny_target(), [1, 2]).tokens == [1, 2]
