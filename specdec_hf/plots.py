"""Pictures of an evaluation and of a calibration. Rank 0: plain numbers in, a matplotlib ``Figure`` out.

Figures are made without pyplot, so nothing of the process's matplotlib state is touched. Needs the extra ``plots``.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#1f6fb4", "#d1670f", "#2a8a57", "#8a5bb0", "#b3364b", "#5f6b76")
"""Told apart by most colour-blind readers, dark enough on white."""


def require_matplotlib(what: str) -> None:
    """Raise ImportError with the command that installs matplotlib, if it is not there.

    Args:
        what: what it is needed for, e.g. "the report's plots".
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"{what} need matplotlib: run `pip install 'specdec_hf[plots]'`")


def svg_uri(figure: Any) -> str:
    """The figure as a ``data:`` address, to stand in an HTML file of its own."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def save_png(figure: Any, path: Path) -> None:
    """Write the figure as a PNG, 150 dots per inch."""
    figure.savefig(path, format="png", dpi=150, bbox_inches="tight")


def _axes(title: str, x: str, y: str, columns: int = 1, size: tuple[float, float] = (6.4, 3.8)) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, sharey=columns > 1)[0]
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    for index, one in enumerate(axes):
        one.set_xlabel(x, fontsize=9)
        if index == 0:
            one.set_ylabel(y, fontsize=9)
        one.grid(True, axis="y", color="#e4e7ea", linewidth=0.8)
        one.set_axisbelow(True)
        one.tick_params(labelsize=8, color="#9aa3ab")
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            one.spines[side].set_color("#9aa3ab")
    return figure, axes if columns > 1 else axes[0]


def bars(
    title: str, y: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], line: float, note: str
) -> Any:
    """A bar for every group and series, its value on top.

    Args:
        title, y: heading and the axis's label.
        groups: names along the axis.
        series: values by the series' name, one a group (None = no bar).
        line: a value to compare with, drawn dashed.
        note: what ``line`` is.
    """
    figure, axes = _axes(title, "", y)
    width = 0.8 / max(len(series), 1)
    for index, (name, values) in enumerate(series.items()):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(groups))]
        heights = [value if value is not None else 0.0 for value in values]
        drawn = axes.bar(places, heights, width * 0.92, label=name, color=COLOURS[index % len(COLOURS)])
        labels = ["" if value is None else f"{value:.2f}" for value in values]
        axes.bar_label(drawn, labels=labels, fontsize=8, padding=2)
    axes.axhline(line, color="#444b52", linewidth=1, linestyle="--", label=note)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    _legend(axes, above=True)
    return figure


def positions(title: str, y: str, panels: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Any:
    """Shares by the place in the block, a panel for every entry of ``panels``, a line for every series in it."""
    figure, axes = _axes(title, "place in the block", y, len(panels), (3.4 * len(panels) + 0.8, 3.6))
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    for one, (panel, series) in zip(axes if len(panels) > 1 else [axes], panels.items(), strict=True):
        one.set_title(panel, fontsize=9)
        for name, values in series.items():
            places = [place for place, value in enumerate(values, 1) if value is not None]
            shares = [value for value in values if value is not None]
            one.plot(
                places, shares, marker="o", markersize=4, label=name, color=COLOURS[names.index(name) % len(COLOURS)]
            )
        one.set_ylim(0, 1.02)
        one.xaxis.get_major_locator().set_params(integer=True)
        _legend(one)
    return figure


def lines(title: str, x: str, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> Any:
    """Curves through points (x, y): a panel for every entry, each with a scale of its own, a line for every series."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(panels) + 0.6, 3.4), layout="constrained")
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    grid = figure.subplots(1, len(panels), squeeze=False, sharex=True)[0]
    for one, (panel, series) in zip(grid, panels.items(), strict=True):
        for name, points in series.items():
            one.plot(
                [point[0] for point in points],
                [point[1] for point in points],
                marker="o",
                markersize=4,
                label=name,
                color=COLOURS[names.index(name) % len(COLOURS)],
            )
        one.set_title(panel, fontsize=9)
        one.set_xlabel(x, fontsize=9)
        one.grid(True, color="#e4e7ea", linewidth=0.8)
        one.tick_params(labelsize=8)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
        _legend(one)
    return figure


def histogram(title: str, x: str, series: Mapping[str, Sequence[int]]) -> Any:
    """Shares of counts: entry n of a series counts the value n; values from 1 on are drawn side by side."""
    figure, axes = _axes(title, x, "share of rounds")
    width = 0.8 / max(len(series), 1)
    for index, (name, counts) in enumerate(series.items()):
        total = sum(counts) or 1
        places = [n + (index - (len(series) - 1) / 2) * width for n in range(1, len(counts))]
        axes.bar(
            places,
            [count / total for count in counts[1:]],
            width * 0.92,
            label=name,
            color=COLOURS[index % len(COLOURS)],
        )
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes, above=True)
    return figure


def reliability(title: str, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, int]]]]) -> Any:
    """Predicted against observed survival, a panel for every place of the block.

    Args:
        title: heading.
        panels: by the place's name, by the series' name: (mean prediction, observed share, rounds) of each bin. The
            area of a dot is its share of the rounds.
    """
    from matplotlib.figure import Figure

    columns = 3 if len(panels) in (5, 6) else min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.7 * columns + 0.4, 2.7 * rows + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for one in grid[len(panels) :]:
        one.set_visible(False)
    for one, (panel, series) in zip(grid, panels.items(), strict=False):
        one.plot([0, 1], [0, 1], color="#9aa3ab", linewidth=1, linestyle="--")
        for index, (name, bins) in enumerate(series.items()):
            total = sum(count for *_, count in bins) or 1
            bins = [one_bin for one_bin in bins if one_bin[2] >= 10]
            x, y = [predicted for predicted, *_ in bins], [observed for _, observed, _ in bins]
            one.plot(x, y, color=COLOURS[index], linewidth=1.2, label=name)
            one.scatter(
                x, y, s=[8 + 140 * count / total for *_, count in bins], color=COLOURS[index], alpha=0.6, linewidths=0
            )
        one.set_title(panel, fontsize=8)
        one.set_xlim(-0.02, 1.02)
        one.set_ylim(-0.02, 1.02)
        one.set_aspect("equal")
        one.tick_params(labelsize=7)
        one.legend(fontsize=7, frameon=False, loc="upper left")
    figure.supxlabel("predicted survival", fontsize=9)
    figure.supylabel("observed survival", fontsize=9)
    return figure


def _legend(axes: Any, above: bool = False) -> None:
    """A legend inside, or right of the heading where bars would lie under it."""
    handles, labels = axes.get_legend_handles_labels()
    if labels and above:
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(labels)}
        axes.legend(handles, labels, fontsize=8, frameon=False, borderaxespad=0.2, **place)
    elif labels:
        axes.legend(handles, labels, fontsize=8, frameon=False)
