"""The serving simulation: the three ways to choose, the clock, and a run from files to table and picture."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "serving_simulation.py"


@pytest.fixture(scope="module")
def serving() -> Any:
    spec = importlib.util.spec_from_file_location("serving_simulation", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trace(serving: Any) -> list[Any]:
    """Eight rounds of four drafted tokens, of which 4, 3, ... are accepted, with confidences that say so."""
    counts = (4, 3, 4, 1, 2, 4, 0, 3)
    return [serving.Round(tuple(0.95 if k < n else 0.1 for k in range(4)), n) for n in counts]


def flat(serving: Any) -> Any:
    return serving.Costs({1: 0.01, 1024: 0.01})


def steep(serving: Any) -> Any:
    return serving.Costs({1: 0.01, 2: 0.02})


def test_how_much_is_verified(serving):
    rows = [(0.9, 0.5, 0.9), (0.2, 0.9), ()]
    assert serving.constant(2)(rows) == [2, 2, 0]
    assert serving.threshold(0.6)(rows) == [1, 0, 0] and serving.threshold(0.0)(rows) == [3, 2, 0]
    assert serving.scheduler(lambda rows, tokens: 1.0)(rows) == [3, 2, 0]
    assert serving.scheduler(lambda rows, tokens: 1.0 / tokens)(rows) == [0, 0, 0]
    # admissions 0.9, 0.45, 0.405, 0.2, 0.18 to tau = 3: the third step back ends it, whatever would come behind
    steps = {3: 1.0, 4: 0.9, 5: 0.85, 6: 0.7, 7: 10.0, 8: 10.0}
    assert serving.scheduler(lambda rows, tokens: steps[tokens])(rows) == [2, 0, 0]


def test_the_papers_counterexample(serving):
    """The second token's confidence must not decide whether the first is verified: with 0.9 behind it, and with 0."""
    steps = {1: 1.0, 2: 0.5, 3: 0.45}
    choose = serving.scheduler(lambda rows, tokens: steps[tokens])
    assert choose([(0.8, 0.9)]) == choose([(0.8, 0.0)]) == [0]


def test_costs(serving):
    costs = serving.Costs({1: 1.0, 4: 2.5, 8: 3.0}, {1: 0.5})
    assert costs.step(1, 1) == 1.5 and costs.step(1, 2, drafts=False) == 1.5
    assert costs.step(2, 6) == 2.75 + 1.0 and costs.step(1, 16, drafts=False) == 6.0


def test_the_clock(serving):
    rounds, costs = [trace(serving)], flat(serving)
    plain = serving.simulate(rounds, costs, serving.constant(0), users=3, requests=30, length=20, drafts=False)
    assert plain.throughput == pytest.approx(300) and plain.accepted == 1 and plain.batch == 3
    assert plain.latency == pytest.approx(0.2)
    whole = serving.simulate(rounds, costs, serving.constant(4), users=3, requests=300, length=80)
    assert whole.accepted == pytest.approx(1 + 21 / 8, rel=0.05) and whole.verified == 4
    assert whole.throughput == pytest.approx(100 * whole.accepted * whole.batch)
    calm = serving.simulate(rounds, costs, serving.constant(4), rate=1.0, requests=300, length=80)
    assert calm.throughput == pytest.approx(80, rel=0.2) and calm.latency == pytest.approx(0.22, rel=0.2)
    busy = serving.simulate(rounds, costs, serving.constant(0), rate=100.0, requests=300, length=80, slots=2)
    assert busy.throughput == pytest.approx(200, rel=0.02) and busy.batch == pytest.approx(2, rel=0.02)
    with pytest.raises(ValueError, match="give one of them"):
        serving.simulate(rounds, costs, serving.constant(0))


def test_the_scheduler_follows_the_load(serving):
    """As good as the best constant where tokens are free, and as plain decoding where each costs as much as a row."""
    rounds = [trace(serving)]
    for costs, best in ((flat(serving), 4), (steep(serving), 0)):
        choose = serving.scheduler(lambda rows, tokens, costs=costs: 1.0 / costs.step(rows, tokens))
        limits = {"users": 4, "requests": 100, "length": 40}
        own = serving.simulate(rounds, costs, choose, **limits)
        other = serving.simulate(rounds, costs, serving.constant(best), **limits)
        assert own.throughput == pytest.approx(other.throughput, rel=0.05)
    bent = serving.Costs({1: 0.01, 16: 0.011, 17: 0.02, 64: 0.08})
    choose = serving.scheduler(lambda rows, tokens: 1.0 / bent.step(rows, tokens))
    light, heavy = (serving.simulate(rounds, bent, choose, users=n, requests=100, length=40) for n in (1, 16))
    assert light.verified > 2 > 1 > heavy.verified


def test_from_files_to_a_picture(serving, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    traces, costs, picture = tmp_path / "traces.json", tmp_path / "costs.json", tmp_path / "load.png"
    rounds = [{"confidence": list(one.confidence), "accepted": one.accepted} for one in trace(serving)]
    traces.write_text(json.dumps([rounds, []]))
    costs.write_text(json.dumps({"forward": {"1": 0.01, "64": 0.03}}))
    arguments = ["--traces", str(traces), "--costs", str(costs), "--plot", str(picture), "--users", "1", "4"]
    serving.main([*arguments, "--requests", "20", "--length", "20", "--slots", "8"])
    text = capsys.readouterr().out
    assert "What it assumes" in text and "scheduler" in text and "threshold 0.5" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    traces.write_text("[]")
    with pytest.raises(ValueError, match="holds no rounds"):
        serving.main(arguments)
