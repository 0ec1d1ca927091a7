"""Plots of a run as inline SVG, which takes its colours from the page."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.records.files.run_files import RecordedRun

PHASES = (
    "load",
    "generate",
    "sleep",
    "batch",
    "old_log_prob",
    "reference",
    "values",
    "reward",
    "advantages",
    "update_critic",
    "update_actor",
    "sync_weights",
)
COLOURS = (
    "#3b82c4",
    "#e08a3c",
    "#4f9d69",
    "#c4545f",
    "#8a6fc0",
    "#3ba7a0",
    "#b98d2f",
    "#8a8f98",
    "#a35d8f",
    "#5b6ee1",
    "#7d9a3c",
    "#d0739c",
)
_INK = "#777777"  # becomes the page's own text colour


@dataclass(frozen=True)
class Plot:
    """A plot on a page: its title, the SVG, and whether it takes the full width."""

    title: str
    svg: str
    wide: bool


def draw_learning(axes: Axes, run: RecordedRun) -> None:
    low, high = 0.0, 1.0
    for colour, metric, label, marker in (
        (COLOURS[0], "reward/mean", "reward of the samples", ""),
        (COLOURS[1], "validation/exact_match", "exact match, held-out, greedy", "o"),
        (COLOURS[2], "dpo/accuracy", "chosen response preferred", ""),
        (COLOURS[3], "validation/preference_accuracy", "chosen response preferred, held-out", "o"),
    ):
        steps, values = run.series(metric)
        if steps:
            draw_line(axes, steps, values, colour, label, marker)
            low, high = min([low, *filter(isfinite, values)]), max([high, *filter(isfinite, values)])
    margin = (high - low) / 50
    axes.set(ylim=(low - margin, high + margin), xlabel="step")
    add_legend(axes)


def draw_line(
    axes: Axes, steps: Sequence[float], values: Sequence[float], colour: str, label: str, marker: str = ""
) -> None:
    """A line with a marker at each point, or else with a dot at each point that no segment reaches."""
    finite = [False, *map(isfinite, values), False]
    alone = [place for place in range(len(values)) if finite[place : place + 3] == [False, True, False]]
    shown = {"marker": ".", "markevery": alone} if alone and not marker else {"marker": marker}
    axes.plot(steps, values, color=colour, label=label, **shown)


def add_legend(axes: Axes) -> None:
    """A legend above the plot, where it hides no line. A single line needs none: the title names it."""
    if len(axes.lines) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, borderpad=0)


def label_bar(axes: Axes, end: float, place: float, seconds: float) -> None:
    """Seconds beside the end of a horizontal bar."""
    axes.annotate(f"{seconds:.2f} s", (end, place), xytext=(4, 0), textcoords="offset points", va="center")


def draw_lines(*metrics: tuple[str, str]) -> Callable[[Axes, RecordedRun], None]:
    def draw(axes: Axes, run: RecordedRun) -> None:
        for colour, (metric, label) in zip(COLOURS, metrics, strict=False):
            steps, values = run.series(metric)
            if steps:  # a run without a critic has none of its curves
                draw_line(axes, steps, values, colour, label)
        axes.set(xlabel="step")
        add_legend(axes)

    return draw


def draw_group(prefix: str) -> Callable[[Axes, RecordedRun], None]:
    """A line above 0 for each metric that starts so, labelled with the rest of its name; equal ones share a line."""

    def draw(axes: Axes, run: RecordedRun) -> None:
        equal: dict[str, list[str]] = {}
        for name in run.names(prefix):
            equal.setdefault(repr(run.series(name)), []).append(name)
        lines = (
            (names[0], ", ".join(name.removeprefix(prefix).replace("_", " ") for name in names))
            for names in equal.values()
        )
        draw_lines(*lines)(axes, run)
        axes.set_ylim(bottom=0)

    return draw


def draw_tflops(axes: Axes, run: RecordedRun) -> None:
    """FLOP/s of the passes where the chip is unknown, so that there is no MFU."""
    if not run.names("mfu/"):
        draw_group("tflops/")(axes, run)


def draw_shares(*metrics: tuple[str, str]) -> Callable[[Axes, RecordedRun], None]:
    """Lines between 0 and 1."""

    def draw(axes: Axes, run: RecordedRun) -> None:
        draw_lines(*metrics)(axes, run)
        axes.set(ylim=(-0.02, 1.02))

    return draw


def draw_staleness(axes: Axes, run: RecordedRun) -> None:
    """The histogram of the tokens' ages of each step: shares, stacked."""
    names = run.names("rollout/staleness/")
    rows = [row for row in run.rows if any(name in row for name in names)]
    if not rows:
        return
    # Each step is as wide as a bar, so that a single one is visible.
    edges = [row["step"] + side for row in rows for side in (-0.5, 0.5)]
    shares = [[row.get(name, 0.0) for row in rows for _ in range(2)] for name in names]
    ages = [name.removeprefix("rollout/staleness/") for name in names]
    labels = [f"{age} update{'' if age == '1' else 's'}" for age in ages]
    axes.stackplot(edges, shares, labels=labels, colors=COLOURS)
    axes.set(xlabel="step", ylim=(0, 1))
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, borderpad=0)


def draw_phases(axes: Axes, run: RecordedRun) -> None:
    """Seconds of each phase, stacked, per step."""
    rows = [row for row in run.rows if "time/step" in row]
    steps = [row["step"] for row in rows]
    values = [[row.get(f"time/{phase}", 0.0) for row in rows] for phase in PHASES]
    if len(steps) == 1:  # as wide as a bar, because an area without width is invisible
        steps, values = [steps[0] - 0.5, steps[0] + 0.5], [2 * seconds for seconds in values]
    axes.stackplot(steps, values, labels=[phase.replace("_", " ") for phase in PHASES], colors=COLOURS)
    axes.set(xlabel="step", ylabel="seconds")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def draw_waterfall(axes: Axes, run: RecordedRun) -> None:
    """The mean step as a waterfall: each phase starts where the one before it ends."""
    means = [run.mean_seconds(phase) for phase in PHASES]
    start = 0.0
    for place, (colour, seconds) in enumerate(zip(COLOURS, means, strict=True)):
        axes.barh(place, seconds, left=start, color=colour)
        label_bar(axes, start + seconds, place, seconds)
        start += seconds
    axes.set_yticks(range(len(PHASES)), [phase.replace("_", " ") for phase in PHASES])
    axes.set(xlabel="seconds, mean over all steps", xlim=(0, start * 1.12 or 1))
    axes.invert_yaxis()


def figure_svg(draw: Callable[[Axes], None], wide: bool) -> str:
    """A plot as inline SVG, readable on a light and on a dark page; empty if there was nothing to draw."""
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "slipway",
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10.4, 3.4) if wide else (5.1, 2.9), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        axes.grid(alpha=0.15)
        draw(axes)
        if not axes.has_data():
            return ""
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")
