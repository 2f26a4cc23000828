"""How many drafted tokens to verify under load: a simulated server that decodes many requests in one batch. See --help.

It replays recorded rounds against a measured cost of the target's forward, and compares three ways to choose how much
of each draft is verified: a constant K, a confidence threshold, and the throughput scheduler of the DSpark paper
(Algorithm 1: admit drafted tokens of all rows by falling survival, stop at the first drop of tau * SPS(B)).

What it assumes:
- A step drafts for all active rows, then runs one forward over an anchor a row and the admitted tokens. Its time
  depends on the number of tokens in the forward (and of rows, for drafting) only: not on the length of the texts.
- Prefill, sampling, scheduling and network cost nothing. Requests join and leave between steps.
- A request replays the rounds of one recorded answer in order, from a random one on and around, until it has its
  tokens. A round that accepted n of K drafted tokens accepts min(n, l) of l.
- At most --slots requests are active; others wait in the order of their arrival.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Choice = Callable[[Sequence[Sequence[float]]], list[int]]
"""From the confidences of each row's drafted tokens to how many of them are verified."""


@dataclass(frozen=True)
class Round:
    """One recorded round: c_k of each drafted token, and how many of them were accepted."""

    confidence: tuple[float, ...]
    accepted: int


class Costs:
    """Seconds of a step by interpolation between measured points, beyond the last one by its slope from zero.

    Args:
        forward: tokens in the target's forward -> seconds.
        draft: rows that draft -> seconds; empty = drafting is free.
    """

    def __init__(self, forward: dict[int, float], draft: dict[int, float] | None = None) -> None:
        self._forward, self._draft = sorted(forward.items()), sorted((draft or {}).items())

    def step(self, rows: int, tokens: int, drafts: bool = True) -> float:
        """Seconds of a step of so many rows with so many tokens in the forward."""
        seconds = _between(self._forward, tokens)
        return seconds + _between(self._draft, rows) if drafts and self._draft else seconds


def _between(points: list[tuple[int, float]], at: int) -> float:
    place = bisect_left(points, (at, 0.0))
    if place == len(points):
        return points[-1][1] * at / points[-1][0]
    if place == 0:
        return points[0][1]
    (low, below), (high, above) = points[place - 1], points[place]
    return below + (above - below) * (at - low) / (high - low)


# -- how much to verify ----------------------------------------------------------------------------------------------


def constant(count: int) -> Choice:
    """K tokens of every row; 0 is plain decoding."""
    return lambda rows: [min(count, len(row)) for row in rows]


def threshold(least: float) -> Choice:
    """Of every row, the tokens before the first whose confidence is below `least`."""
    return lambda rows: [next((k for k, c in enumerate(row) if c < least), len(row)) for row in rows]


def scheduler(steps_per_second: Callable[[int, int], float]) -> Choice:
    """Algorithm 1. `steps_per_second` takes rows R and tokens in the forward B.

    Stopping at the first drop keeps decoding lossless: whether a token is verified then never depends on itself.
    """

    def choose(rows: Sequence[Sequence[float]]) -> list[int]:
        lengths, tokens, expected = [0] * len(rows), len(rows), float(len(rows))
        best = expected * steps_per_second(len(rows), tokens)
        candidates = []
        for row, confidences in enumerate(rows):
            survival = 1.0
            for place, confidence in enumerate(confidences):
                survival *= confidence
                candidates.append((-survival, place, row))
        for minus, place, row in sorted(candidates):
            tokens, expected = tokens + 1, expected - minus
            rate = expected * steps_per_second(len(rows), tokens)
            if rate <= best:
                break
            best, lengths[row] = rate, place + 1
        return lengths

    return choose


# -- the server ------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """Replays one answer's rounds until `left` tokens are made."""

    rounds: list[Round]
    at: int
    left: int
    arrived: float


@dataclass
class Result:
    """What a simulated run showed.

    Attributes:
        throughput: tokens a second. verified: mean drafted tokens verified, by row and step. accepted: mean tokens
            committed, by row and step (tau). latency: mean seconds of a request, waiting included. batch: mean rows.
    """

    throughput: float
    verified: float
    accepted: float
    latency: float
    batch: float


@dataclass
class _Tally:
    tokens: int = 0
    verified: int = 0
    rows: int = 0
    steps: int = 0
    latencies: list[float] = field(default_factory=list)


def simulate(
    traces: list[list[Round]], costs: Costs, choose: Choice, *, users: int | None = None, rate: float | None = None,
    requests: int = 200, length: int = 128, slots: int = 128, drafts: bool = True, seed: int = 0,
) -> Result:  # fmt: skip
    """Run until `requests` requests are done.

    Args:
        traces: rounds of each recorded answer.
        users: closed loop: so many users, each with a new request as soon as the last is done.
        rate: open loop: Poisson arrivals, requests a second. One of the two.
        length: tokens of a request.
        slots: requests that are decoded at a time, at most.
        drafts: False for plain decoding, which drafts nothing.
    """
    if (users is None) == (rate is None):
        raise ValueError(f"users={users}, rate={rate}: give one of them, a closed loop or Poisson arrivals")
    draw, now, tally = random.Random(seed), 0.0, _Tally()

    def new(arrived: float) -> Request:
        rounds = draw.choice(traces)
        return Request(rounds, draw.randrange(len(rounds)), length, arrived)

    waiting = deque(new(0.0) for _ in range(users or 0))
    coming = draw.expovariate(rate) if rate else None
    active: list[Request] = []
    while len(tally.latencies) < requests:
        while rate and coming is not None and (coming <= now or not (active or waiting)):
            now = max(now, coming)
            waiting.append(new(coming))
            coming += draw.expovariate(rate)
        while waiting and len(active) < slots:
            active.append(waiting.popleft())
        lengths = choose([one.rounds[one.at].confidence for one in active])
        now += costs.step(len(active), len(active) + sum(lengths), drafts)
        tally.steps, tally.rows, tally.verified = (
            tally.steps + 1, tally.rows + len(active), tally.verified + sum(lengths)
        )  # fmt: skip
        for one, count in zip(active, lengths, strict=True):
            gained = min(min(one.rounds[one.at].accepted, count) + 1, one.left)
            one.left, one.at, tally.tokens = one.left - gained, (one.at + 1) % len(one.rounds), tally.tokens + gained
        done = [one for one in active if not one.left]
        active = [one for one in active if one.left]
        tally.latencies += [now - one.arrived for one in done]
        waiting.extend(new(now) for _ in done if users)
    return Result(
        tally.tokens / now, tally.verified / tally.rows, tally.tokens / tally.rows,
        statistics.mean(tally.latencies), tally.rows / tally.steps,
    )  # fmt: skip


# -- files -----------------------------------------------------------------------------------------------------------


def read_traces(path: Path) -> list[list[Round]]:
    """``[[{"confidence": [...], "accepted": n}, ...], ...]``: the rounds of each answer."""
    answers = json.loads(path.read_text(encoding="utf-8"))
    traces = [[Round(tuple(one["confidence"]), one["accepted"]) for one in rounds] for rounds in answers if rounds]
    if not traces:
        raise ValueError(f"{path} holds no rounds; record some with --record")
    return traces


def read_costs(path: Path) -> Costs:
    """``{"forward": {tokens: seconds}, "draft": {rows: seconds}}``; draft may be left out."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return Costs(*({int(n): float(s) for n, s in found.get(name, {}).items()} for name in ("forward", "draft")))


def record(options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The rounds of one greedy answer to each prompt, by `generate()` that verifies whole blocks."""
    from specdec_hf.calibration import record_rounds
    from specdec_hf.loading import load_pair
    from specdec_hf.prompts import read_conversations

    pair = load_pair(options.target, options.draft, options.dtype)
    conversations = [one for path in options.prompts for one in read_conversations(path, options.limit)]
    answers = []
    for rounds in record_rounds(pair, conversations, [0.0], options.length):
        chances = pair.head.confidence_probs(rounds.logits.float())
        rows = [row[~row.isnan()].tolist() for row in chances]
        answers.append(
            [
                {"confidence": [round(c, 4) for c in row], "accepted": accepted}
                for row, accepted in zip(rows, rounds.accepted.tolist(), strict=True)
            ]
        )
    return answers


def measure(options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Seconds of one block of so many tokens behind 128 cached ones, and of drafting for so many rows; medians."""
    import torch
    from transformers import DynamicCache

    from specdec_hf import _hf
    from specdec_hf.loading import load_pair

    pair, counts = load_pair(options.target, options.draft, options.dtype), (1, 2, 4, 8, 16, 32, 64, 128)
    model, head = pair.model, pair.head.bind(pair.model)
    costs: dict[str, dict[int, float]] = {"forward": {}, "draft": {}}
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.ones(1, 128, dtype=torch.long), **{_hf.CACHE_KEY: cache})
        for count in counts:
            block = torch.ones(1, count, dtype=torch.long)

            def forward(block: Any = block) -> None:
                model(input_ids=block, **{_hf.CACHE_KEY: cache})
                cache.crop(-block.shape[1])

            costs["forward"][count] = median_seconds(forward, options.repeats)
            context = head.new_context(count, 128)
            taps = torch.zeros(count, 128, len(head.config.target_layer_ids) * head.config.target_hidden_size)
            head.extend_context(context, taps, torch.arange(128).expand(count, -1))
            anchors = torch.ones(count, dtype=torch.long)

            def draft(context: Any = context, anchors: Any = anchors) -> None:
                hidden, base = head.draft_block(context, anchors, torch.full_like(anchors, 128))
                previous, state = anchors, None
                for k in range(base.shape[1]):
                    logits, _, state = head.markov_step(state, previous, hidden[:, k], base[:, k])
                    previous = head.draft_token_ids()[logits.argmax(dim=-1)]

            costs["draft"][count] = median_seconds(draft, options.repeats)
    return costs


def median_seconds(job: Callable[[], None], repeats: int) -> float:
    """Seconds of processor time (not of waiting for it), the median of some runs after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        job()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


# -- the comparison --------------------------------------------------------------------------------------------------


def compare(
    traces: list[list[Round]], costs: Costs, users: Sequence[int], options: argparse.Namespace
) -> dict[str, dict[str, list[tuple[float, Result]]]]:
    """By kind of load ("closed", "poisson") and way to choose: (load, result) at every load."""
    most = max(len(one.confidence) for rounds in traces for one in rounds)
    ways: dict[str, Choice] = {"plain": constant(0)}
    ways |= {f"constant {k}": constant(k) for k in sorted({1, (most + 1) // 2, most})}
    ways |= {f"threshold {t}": threshold(t) for t in options.thresholds}
    ways["scheduler"] = scheduler(lambda rows, tokens: 1.0 / costs.step(rows, tokens))
    limits: dict[str, Any] = {"requests": options.requests, "length": options.length, "slots": options.slots}
    capacity = options.slots / costs.step(options.slots, options.slots, drafts=False) / options.length
    rates = [share * capacity for share in (0.1, 0.25, 0.5, 0.75, 1.0, 1.25)]  # of what plain decoding can do at most
    results: dict[str, dict[str, list[tuple[float, Result]]]] = {"closed": {}, "poisson": {}}
    for name, way in ways.items():
        limits["drafts"] = name != "plain"
        results["closed"][name] = [(n, simulate(traces, costs, way, users=n, **limits)) for n in users]
        results["poisson"][name] = [(rate, simulate(traces, costs, way, rate=rate, **limits)) for rate in rates]
    return results


def table(results: dict[str, dict[str, list[tuple[float, Result]]]]) -> str:
    """All of it as text: tokens a second and mean verified length; for Poisson arrivals seconds a request too."""
    lines = []
    for kind, title in (("closed", "closed loop, users"), ("poisson", "Poisson arrivals, requests a second")):
        loads = [load for load, _ in next(iter(results[kind].values()))]
        lines.append(f"{title:36s}" + "".join(f"{load:>18.3g}" for load in loads))
        for name, row in results[kind].items():
            cells = [f"{one.throughput:9.1f} ({one.verified:4.2f})" for _, one in row]
            lines.append(f"{name:36s}" + "".join(f"{cell:>18s}" for cell in cells))
            if kind == "poisson":
                lines.append(f"{'  seconds a request':36s}" + "".join(f"{one.latency:>18.2f}" for _, one in row))
        lines.append("")
    return "\n".join([*lines, "tokens a second (mean drafted tokens verified by row and step)"])


def plot(results: dict[str, dict[str, list[tuple[float, Result]]]], path: Path) -> None:
    """Throughput (Poisson: seconds a request) and mean verified length against the load, one column a kind of load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex="col", layout="constrained")
    values = {"closed": ("throughput", "tokens a second"), "poisson": ("latency", "seconds a request")}
    for column, (kind, label) in enumerate((("closed", "users"), ("poisson", "requests a second"))):
        for name, row in results[kind].items():
            style = {"plain": "k:", "scheduler": "r-o"}.get(name, "--" if name.startswith("threshold") else "-")
            loads = [load for load, _ in row]
            axes[0, column].plot(loads, [getattr(one, values[kind][0]) for _, one in row], style, label=name)
            axes[1, column].plot(loads, [one.verified for _, one in row], style, label=name)
        axes[0, column].set(ylabel=values[kind][1], xscale="log" if kind == "closed" else "linear", yscale="log")
        axes[1, column].set(ylabel="drafted tokens verified, mean", xlabel=label)
    axes[0, 0].set_title("closed loop")
    axes[0, 1].set_title("Poisson arrivals")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("traces.json"), help="recorded rounds (JSON)")
    parser.add_argument("--costs", type=Path, default=Path("costs.json"), help="seconds by tokens and rows (JSON)")
    parser.add_argument("--record", action="store_true", help="write --traces: answers to --prompts")
    parser.add_argument("--measure", action="store_true", help="write --costs: 1 to 128 tokens and rows, on this CPU")
    parser.add_argument("--prompts", nargs="*", default=[], help="files of prompts (JSON lines) for --record")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--target", help="default: the bundled head's target")
    parser.add_argument("--draft", help="default: the bundled head")
    parser.add_argument("--dtype", default="auto", help="of both models; auto: the one that is fast here")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each cost")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--thresholds", type=float, nargs="*", default=[0.3, 0.5])
    parser.add_argument("--requests", type=int, default=200, help="done in each run")
    parser.add_argument("--length", type=int, default=128, help="tokens of a request or recorded answer")
    parser.add_argument("--slots", type=int, default=128, help="requests decoded at a time, at most")
    parser.add_argument("--plot", type=Path, help="write a picture (PNG)")
    options = parser.parse_args(arguments)
    if options.record:
        options.traces.write_text(json.dumps(record(options)), encoding="utf-8")
    if options.measure:
        options.costs.write_text(json.dumps(measure(options), indent=1), encoding="utf-8")
    results = compare(read_traces(options.traces), read_costs(options.costs), options.users, options)
    print(__doc__[__doc__.index("What it assumes") :])
    print(table(results))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
