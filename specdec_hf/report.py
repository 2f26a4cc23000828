"""An evaluation's record (see `evaluation.evaluate`) as a table for the terminal, a JSON file and one HTML file.

Reads the record alone, so a report can be made again from `eval.json`. Rank 1.
"""

from __future__ import annotations

import html
import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import plots

TAU = "tau: tokens that one forward of the target yields, its own bonus token counted; plain decoding has 1."
FEW = 10
"""Conditional shares of fewer rounds than this are not shown (the JSON file has them)."""
SPEED = (
    "Speed counts from the start of the call, prompt included, up to the cut. 'median' is the ratio of the medians "
    "over prompts of seconds per token, 'total' that of all tokens per second. Plain decoding and speculation took "
    "turns."
)


def table(result: dict[str, Any]) -> str:
    """The figures as text of at most 120 columns."""
    widths: tuple[int, ...] = (-16, 4, 7, 4, 7, 7, 6, 6, 11, 7, 7, 7)
    names = ("data set", "T", "answers", "cut", "tokens", "rounds", "tau", "uncut")
    lines = [_aligned((*names, "plain tok/s", "DSpark", "median", "total"), widths) + "  same greedy text"]
    for row in result["results"]:
        speed = row["speed_up"]
        cells: tuple[Any, ...] = (
            row["data"][-16:], f"{row['temperature']:g}", row["answers"], row["cut"], row["tokens"], row["rounds"],
            number(row["tau"]), number(row["tau_uncut"]), f"{speed['plain_tokens_per_second']:.1f}",
            f"{speed['draft_tokens_per_second']:.1f}", f"{speed['median']:.2f}x", f"{speed['total']:.2f}x",
        )  # fmt: skip
        lines.append(f"{_aligned(cells, widths)}  {verdict(row['lossless'])}".rstrip())
    if len({row["data"] for row in result["results"]}) > 1:
        for mean in result["macro"]:
            speeds = (f"{mean['median']:.2f}x", f"{mean['total']:.2f}x")
            cells = ("mean of sets", f"{mean['temperature']:g}", *[""] * 4, number(mean["tau"]), *[""] * 3, *speeds)
            lines.append(_aligned(cells, widths))
    lines += ["", "acceptance by place in the block (all up to it accepted), and given that those before it were:"]
    for row in result["results"]:
        for key in ("survival", "conditional"):
            name = f"{row['data'][-16:]} T = {row['temperature']:g}" if key == "survival" else "  conditional"
            lines.append(f"{name:<24} " + " ".join(f"{number(value):>5}" for value in shares(row, key)))
    if result["sweep"]:
        widths = (9, 8, 8, 8, 6, 6, 7)
        lines += ["", _aligned(("threshold", "drafted", "accepted", "rejected", "rate", "tau", "tok/s"), widths)]
        for row in pooled_sweep(result):
            counts = (row["drafted"], row["accepted"], row["rejected"])
            rates = (number(row["rate"]), number(row["tau"]), f"{row['tokens_per_second']:.1f}")
            lines.append(_aligned((f"{row['threshold']:.2f}", *counts, *rates), widths))
    lines.append("")
    for note in (TAU, SPEED, result["rule"], *warnings_of(result)):
        lines += textwrap.wrap(note, 118)
    return "\n".join(lines)


def _aligned(cells: Sequence[Any], widths: Sequence[int]) -> str:
    """Cells in columns; a negative width puts a cell to the left."""
    pairs = zip(map(str, cells), widths, strict=True)
    return " ".join(cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in pairs)


def number(value: float | None) -> str:
    """Two decimals, a dash for None."""
    return "-" if value is None else f"{value:.2f}"


def shares(row: dict[str, Any], key: str) -> list[float | None]:
    """Acceptance by place, None where fewer than `FEW` rounds came that far: a share of three rounds misleads."""
    if key == "survival":
        return list(row[key])
    return [share if reached >= FEW else None for share, reached in zip(row[key], row["reached"], strict=True)]


def verdict(lossless: dict[str, Any] | None) -> str:
    """The lossless check in a few words; empty where there was none (sampling)."""
    if lossless is None:
        return ""
    same = lossless["compared"] - lossless["different"]
    words = f"{same} of {lossless['compared']}"
    return words + {"equal": "", "near ties": ", rest near ties", "failed": ", NOT EXPLAINED"}[lossless["verdict"]]


def warnings_of(result: dict[str, Any]) -> list[str]:
    """What a reader must know before trusting the figures, a sentence each."""
    notes = []
    left_out = sum(row["left_out"] for row in result["results"])
    if left_out:
        notes.append(f"{left_out} turns were left out: they do not fit the target's window.")
    checks = [row["lossless"] for row in result["results"] if row["lossless"] is not None]
    dtype = result["provenance"]["dtype"]
    if any(check["verdict"] == "failed" for check in checks):
        rule = "float32 allows no difference" if dtype == "float32" else "they lie too far apart for rounding"
        notes.append(f"LOSSLESS CHECK FAILED: greedy texts differ and {rule}. Please report this with the JSON file.")
    elif any(check["different"] for check in checks):
        notes.append(
            f"In {dtype} greedy texts can part where the target's two best logits are nearly level, since a forward of "
            "several tokens rounds differently; the gaps are listed in the JSON file and the report."
        )
    return notes


def pooled_sweep(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The threshold sweep over all data sets together."""
    pooled = []
    for threshold in dict.fromkeys(row["threshold"] for row in result["sweep"]):
        rows = [row for row in result["sweep"] if row["threshold"] == threshold]
        sums = {key: sum(row[key] for row in rows) for key in ("rounds", "drafted", "accepted", "rejected")}
        tokens = sum((row["tau"] or 0.0) * row["rounds"] for row in rows)
        seconds = sum((row["tau"] or 0.0) * row["rounds"] / row["tokens_per_second"] for row in rows)
        pooled.append(
            {
                "threshold": threshold,
                **sums,
                "rate": sums["accepted"] / sums["drafted"] if sums["drafted"] else None,
                "tau": tokens / sums["rounds"] if sums["rounds"] else None,
                "tokens_per_second": tokens / seconds if seconds else 0.0,
            }
        )
    return pooled


def write_report(result: dict[str, Any], directory: Path) -> None:
    """Write `eval.json` and `report.html`, each whole or not at all.

    Raises:
        ImportError: matplotlib is not installed. OSError: not writable.
    """
    plots.require_matplotlib("the report's plots")
    for name, text in (
        ("eval.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n"),
        ("report.html", page(result)),
    ):
        unfinished = directory / f".{name}.part"
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, directory / name)


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """The report's pictures by their captions."""
    rows = result["results"]
    names = list(dict.fromkeys(row["data"] for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    found = {(row["data"], row["temperature"]): row for row in rows}

    def series(value: Any) -> dict[str, list[Any]]:
        return {f"T = {t:g}": [value(found[name, t]) for name in names] for t in temperatures}

    def by_place(key: str) -> dict[str, dict[str, Any]]:
        return {f"T = {t:g}": {name: shares(found[name, t], key) for name in names} for t in temperatures}

    pictures = {
        TAU: plots.bars("Accepted length", "tau", names, series(lambda row: row["tau"]), 1.0, "plain decoding"),
        "Above the line speculation is faster than plain generate() (ratio of medians over prompts).": plots.bars(
            "Speed-up", "times plain generate()", names, series(lambda row: row["speed_up"]["median"]), 1.0, "as fast"
        ),
        "Share of drafted tokens that were accepted with all before them.": plots.positions(
            "Acceptance by place", "share accepted", by_place("survival")
        ),
        f"The same among rounds that kept all tokens before that place, where {FEW} or more did.": plots.positions(
            "Conditional acceptance", "share accepted", by_place("conditional")
        ),
        "How many tokens a round gained.": plots.histogram(
            "Tokens per round",
            "tokens, bonus token counted",
            {f"T = {t:g}": _added([found[name, t]["lengths"] for name in names]) for t in temperatures},
        ),
    }
    if result["sweep"]:
        by_name = {name: [row for row in result["sweep"] if row["data"] == name] for name in names}
        pictures["A higher confidence threshold verifies fewer tokens: the rate rises and tau falls (greedy)."] = (
            plots.lines(
                "Confidence threshold",
                "threshold",
                {
                    title: {
                        name: [(row["threshold"], row[key]) for row in chosen if row[key] is not None]
                        for name, chosen in by_name.items()
                    }
                    for title, key in (
                        ("accepted / drafted", "rate"),
                        ("tau", "tau"),
                        ("tokens per second", "tokens_per_second"),
                    )
                },
            )
        )
    return pictures


def _added(counts: list[list[int]]) -> list[int]:
    width = max(map(len, counts))
    return [sum(row[n] for row in counts if n < len(row)) for n in range(width)]


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#20262c;background:#fff;max-width:1080px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2.2rem}
p.sub{color:#5f6b76;margin-top:0}table{border-collapse:collapse;font-size:13px;margin:.6rem
0;display:block;overflow-x:auto} th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid
#e4e7ea;white-space:nowrap} th{color:#5f6b76;font-weight:600}th:first-child,td:first-child{text-align:left}
figure{margin:1.4rem 0}figure img{max-width:100%}figcaption{color:#5f6b76;font-size:13px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:0 1.5rem}
.warn{border-left:4px solid #d1670f;padding:.4rem .8rem;background:#fdf4ec}
pre{background:#f5f7f8;padding:.8rem;overflow-x:auto;font-size:12px}
"""


def page(result: dict[str, Any]) -> str:
    """The report: one HTML text that needs no other file and no network."""
    source = result["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items() if version)
    machine = f"{source['machine']['processor']}, {source['threads']} threads, {source['device']}, {source['dtype']}"
    notes = "".join(f'<p class="warn">{html.escape(note)}</p>' for note in warnings_of(result))
    pictures = "".join(
        f'<figure><img alt="{html.escape(caption)}" src="{plots.svg_uri(figure)}"><figcaption>{html.escape(caption)}'
        "</figcaption></figure>"
        for caption, figure in figures(result).items()
    )
    sweep = ""
    if result["sweep"]:
        keys = ("threshold", "drafted", "accepted", "rejected", "rate", "tau", "tokens_per_second")
        prompts = sum(row["answers"] for row in result["sweep"] if row["threshold"] == result["sweep"][0]["threshold"])
        sweep = (
            f"<h2>Confidence-threshold sweep</h2><p>Greedy, {prompts} prompts, all data sets together.</p>"
            + _html_table(
                [key.replace("_", " ") for key in keys],
                [[_cell(row[key]) for key in keys] for row in pooled_sweep(result)],
            )
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>specdec eval: {html.escape(result['draft'])}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(result['draft'])}</h1>"
        f'<p class="sub">for {html.escape(result["target"])} &middot; {html.escape(machine)} &middot; {source["date"]}'
        "</p>"
        f"{notes}<h2>Accepted length and speed</h2>{_main_table(result)}"
        f"<p>{html.escape(TAU)} {html.escape(SPEED)} {html.escape(result['rule'])}</p>"
        f'<div class="grid">{pictures}</div>{sweep}{_differences(result)}'
        f"<h2>How this was made</h2><p>{html.escape(versions)}; commit {html.escape(str(source['commit']))}</p>"
        f"<pre>{html.escape(source['command'])}</pre>"
        f"<details><summary>All settings</summary><pre>{html.escape(json.dumps(source, indent=2))}</pre>"
        "</details></body></html>\n"
    )


def _main_table(result: dict[str, Any]) -> str:
    names = (
        "data set", "T", "answers", "cut", "tokens", "rounds", "tau", "tau uncut", "plain tok/s", "DSpark tok/s",
        "median", "total", "target time", "draft time", "same greedy text",
    )  # fmt: skip
    rows = []
    for row in result["results"]:
        speed, seconds = row["speed_up"], row["seconds"]
        whole = sum(seconds.values()) or 1.0
        rows.append(
            [
                row["data"], f"{row['temperature']:g}", row["answers"], row["cut"], row["tokens"], row["rounds"],
                number(row["tau"]), number(row["tau_uncut"]), f"{speed['plain_tokens_per_second']:.1f}",
                f"{speed['draft_tokens_per_second']:.1f}", f"{speed['median']:.2f}x", f"{speed['total']:.2f}x",
                f"{seconds['target'] / whole:.0%}", f"{seconds['draft'] / whole:.0%}", verdict(row["lossless"]),
            ]
        )  # fmt: skip
    for mean in result["macro"] if len({row["data"] for row in result["results"]}) > 1 else []:
        blank = [""] * 4
        middle = [number(mean["tau"]), "", "", "", f"{mean['median']:.2f}x", f"{mean['total']:.2f}x", "", "", ""]
        rows.append(["mean of sets", f"{mean['temperature']:g}", *blank, *middle])
    return _html_table(names, rows)


def _differences(result: dict[str, Any]) -> str:
    checks = [row["lossless"] for row in result["results"] if row["lossless"] is not None]
    if not checks:
        return ""
    compared, found = (
        sum(check["compared"] for check in checks),
        [one for check in checks for one in check["differences"]],
    )
    text = (
        "<h2>Lossless check</h2><p>Greedy answers of plain generate() and of speculation, token for token: "
        f"{compared - len(found)} of {compared} equal.</p>"
    )
    if not found:
        return text
    names = ("prompt", "first different token", "gap of the two best logits", "spacing of the number type", "near tie")
    rows = [
        [one["source"], one["place"], f"{one['gap']:.3g}", f"{one['spacing']:.3g}", "yes" if one["near_tie"] else "NO"]
        for one in found
    ]
    return text + _html_table(names, rows)


def _html_table(names: Any, rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
