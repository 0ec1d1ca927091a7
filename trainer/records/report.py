"""One self-contained page about a run: what it reached, its curves, where the time went, what the model says.

Everything comes from the files that the run left (`docs/design.md` names them), so a report can be written again at any
time, also of a run that was cut short. No script, no font and no address outside the page.
"""

import html
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.errors import DataError
from trainer.records.atomic import atomic_file
from trainer.records.tracking import CONFIG, METRICS, SAMPLES, finished_lines

logging.getLogger("matplotlib.font_manager").setLevel(logging.WARNING)  # it would announce its font cache

REPORT = "report.html"
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
_STEPS_OF_SAMPLES = 3  # how many steps the sample browser shows: the first, one in the middle, the last

Row = dict[str, float]


@dataclass(frozen=True)
class Run:
    """What a run wrote: one row of metrics per step, the samples, the settings."""

    name: str
    rows: list[Row]
    samples: list[dict[str, Any]]
    config: dict[str, Any]

    def series(self, metric: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric, where it was measured."""
        points = [(row["step"], row[metric]) for row in self.rows if metric in row]
        return [step for step, _ in points], [value for _, value in points]


def read_run(run_dir: Path) -> Run:
    """Raises DataError if there are no metrics, or a file is damaged."""
    if not (run_dir / METRICS).is_file():
        raise DataError(f"{run_dir}: no {METRICS} there", hint="name the directory of a run, as in runs/ID")
    config = run_dir / CONFIG
    try:
        settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except ValueError as error:
        raise DataError(f"{config}: damaged: {error}", hint="restore the file from the run") from error
    rows = read_lines(run_dir / METRICS)
    if not rows:
        raise DataError(f"{run_dir / METRICS}: no step was finished", hint="report a run that took a step")
    return Run(run_dir.resolve().name, rows, read_lines(run_dir / SAMPLES), settings)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line; none if there is no such file. A last line that was being written when
    the run died is left out."""
    if not path.is_file():
        return []
    values = []
    for number, line in enumerate(finished_lines(path), start=1):
        try:
            values.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: damaged: {error}", hint="delete that line") from error
    return values


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the run's directory and returns its path. Raises DataError."""
    run = read_run(run_dir)
    path = run_dir / REPORT
    with atomic_file(path) as temporary:
        temporary.write_text(page(run), encoding="utf-8")
    return path


def save_learning_curve(run_dir: Path, path: Path) -> None:
    """Writes the curve of reward and exact match as a picture; the suffix of `path` names the format."""
    run = read_run(run_dir)
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        draw_learning(figure.subplots(), run)
        figure.savefig(path, dpi=150)


# ---- plots ----------------------------------------------------------------------------------------------------------


def draw_learning(axes: Axes, run: Run) -> None:
    low, high = 0.0, 1.0
    for colour, metric, label, marker in (
        (COLOURS[0], "reward/mean", "reward of the samples", ""),
        (COLOURS[1], "validation/exact_match", "exact match, held-out, greedy", "o"),
        (COLOURS[2], "dpo/accuracy", "chosen response preferred", ""),
        (COLOURS[3], "validation/preference_accuracy", "chosen response preferred, held-out", "o"),
    ):
        steps, values = run.series(metric)
        if steps:
            axes.plot(steps, values, color=colour, marker=marker, label=label)
            low, high = min([low, *filter(isfinite, values)]), max([high, *filter(isfinite, values)])
    margin = (high - low) / 50
    axes.set(ylim=(low - margin, high + margin), xlabel="step")
    if axes.lines:
        axes.legend(loc="best", frameon=False)


def draw_lines(*metrics: tuple[str, str]) -> Callable[[Axes, Run], None]:
    def draw(axes: Axes, run: Run) -> None:
        for colour, (metric, label) in zip(COLOURS, metrics, strict=False):
            steps, values = run.series(metric)
            if steps:  # a run without a critic has none of its curves
                axes.plot(steps, values, color=colour, label=label)
        axes.set(xlabel="step")
        if axes.lines:
            axes.legend(loc="best", frameon=False)

    return draw


def draw_phases(axes: Axes, run: Run) -> None:
    """Seconds of each phase, stacked, per step."""
    rows = [row for row in run.rows if "time/step" in row]
    steps = [row["step"] for row in rows]
    values = [[row.get(f"time/{phase}", 0.0) for row in rows] for phase in PHASES]
    axes.stackplot(steps, values, labels=[phase.replace("_", " ") for phase in PHASES], colors=COLOURS)
    axes.set(xlabel="step", ylabel="seconds")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def draw_waterfall(axes: Axes, run: Run) -> None:
    """The mean step as a waterfall: each phase starts where the one before it ends."""
    rows = [row for row in run.rows if "time/step" in row]
    means = [sum(row.get(f"time/{phase}", 0.0) for row in rows) / max(1, len(rows)) for phase in PHASES]
    start = 0.0
    for place, (colour, seconds) in enumerate(zip(COLOURS, means, strict=True)):
        axes.barh(place, seconds, left=start, color=colour)
        axes.text(start + seconds, place, f" {seconds:.2f} s", va="center")
        start += seconds
    axes.set_yticks(range(len(PHASES)), [phase.replace("_", " ") for phase in PHASES])
    axes.set(xlabel="seconds, mean over all steps", xlim=(0, start * 1.12 or 1))
    axes.invert_yaxis()


PLOTS: tuple[tuple[str, Callable[[Axes, Run], None], bool], ...] = (
    ("Learning", draw_learning, True),
    (
        "Distance to the reference",
        draw_lines(("reference/kl", "KL"), ("actor/approximate_kl", "KL of one step")),
        False,
    ),
    ("Entropy and clipping", draw_lines(("actor/entropy", "entropy"), ("actor/clip_fraction", "clip fraction")), False),
    ("Losses", draw_lines(("actor/policy_loss", "policy"), ("critic/value_loss", "value")), False),
    (
        "Gradients, before clipping",
        draw_lines(("actor/gradient_norm", "actor"), ("critic/gradient_norm", "critic")),
        False,
    ),
    ("Tokens per second", draw_lines(("throughput/tokens_per_second", "generated and trained on")), False),
    ("Response length", draw_lines(("rollout/response_length", "tokens")), False),
    ("Where a step's time goes", draw_waterfall, True),
    ("Time of each step", draw_phases, True),
)


def figure_svg(draw: Callable[[Axes], None], wide: bool) -> str:
    """A plot as inline SVG that takes its ink from the page, so that it reads on light and on dark."""
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
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")


def _plot(draw: Callable[[Axes, Run], None], run: Run, wide: bool) -> str:
    return figure_svg(lambda axes: draw(axes, run), wide)


# ---- the page -------------------------------------------------------------------------------------------------------


def page(run: Run) -> str:
    """The whole document."""
    title = html.escape(run.name)
    figures = "".join(
        f'<figure class="{"wide" if wide else ""}"><figcaption>{name}</figcaption>{_plot(draw, run, wide)}</figure>'
        for name, draw, wide in PLOTS
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{title}</h1><section class=tiles>{tiles(run)}</section><section class=plots>{figures}</section>"
        f"<h2>What the model says</h2>{sample_browser(run.samples)}"
        f"<h2>Settings</h2>{settings_table(run.config)}</body></html>\n"
    )


def tiles(run: Run) -> str:
    _, matches = run.series("validation/exact_match")
    _, seconds = run.series("time/step")
    _, tokens = run.series("throughput/tokens_per_second")
    _, differences = run.series("rollout/log_prob_difference")
    elapsed = run.rows[-1].get("wall_time", 0) - run.rows[0].get("wall_time", 0)
    facts = [
        ("exact match, first → last", f"{matches[0]:.1%} → {matches[-1]:.1%}" if matches else "not measured"),
        ("steps", f"{run.rows[-1]['step']:.0f}"),
        ("training time", f"{elapsed:.0f} s"),
        ("seconds per step, median", f"{median(seconds):.2f}"),
        ("tokens per second, median", f"{median(tokens):,.0f}"),
        ("largest log-prob difference, engine to trainer", f"{max(differences, default=0):.1e}"),
    ]
    return "".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in facts)


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def sample_browser(samples: list[dict[str, Any]]) -> str:
    steps = sorted({sample["step"] for sample in samples})
    if not steps:
        return "<p>No samples were kept.</p>"
    chosen = sorted(
        {steps[round(place * (len(steps) - 1) / (_STEPS_OF_SAMPLES - 1))] for place in range(_STEPS_OF_SAMPLES)}
    )
    parts = []
    for step in chosen:
        rows = "".join(
            f"<tr class={'good' if sample['reward'] > 0 else 'bad'}><td>{html.escape(sample['prompt'])}</td>"
            f"<td><pre>{html.escape(sample['response'])}</pre></td><td>{html.escape(sample['ground_truth'])}</td>"
            f"<td>{sample['reward']:g}</td></tr>"
            for sample in samples
            if sample["step"] == step
        )
        head = "<tr><th>prompt</th><th>response</th><th>answer</th><th>reward</th></tr>"
        is_open = " open" if step == chosen[-1] else ""
        parts.append(f"<details{is_open}><summary>step {step}</summary><table>{head}{rows}</table></details>")
    return "".join(parts)


def settings_table(config: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(f'{section}.{name}')}</code></td><td>{html.escape(json.dumps(value))}</td></tr>"
        for section, values in config.items()
        for name, value in values.items()
    )
    return f"<details><summary>every setting of the run</summary><table>{rows}</table></details>"


STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --paper: #fbfaf7; --line: #d9d6cd; --soft: #6d7480; --tile: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe3e8; --paper: #15181d; --line: #333a44; --soft: #98a1ad; --tile: #1c2027 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 66rem;
  margin: 0 auto; padding: 2rem 1.2rem 4rem }
h1 { font-size: 1.5rem; margin: 0 0 1.2rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem }
.tiles div { background: var(--tile); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem }
.tiles b { display: block; font-size: 1.2rem; font-variant-numeric: tabular-nums }
.tiles span { color: var(--soft); font-size: .8rem }
.plots { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2rem; margin-top: 1.6rem }
figure { margin: 0; min-width: 0 } figure.wide { grid-column: 1 / -1 }
figcaption { font-weight: 600; margin-bottom: .2rem } svg { width: 100%; height: auto; color: var(--soft) }
table { border-collapse: collapse; width: 100%; font-size: .88rem; margin: .4rem 0 1rem }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); padding: .3rem .6rem .3rem 0 }
pre { margin: 0; white-space: pre-wrap } summary { cursor: pointer; color: var(--soft) }
tr.good td:last-child { color: #4f9d69; font-weight: 600 } tr.bad td:last-child { color: #c4545f; font-weight: 600 }
@media (max-width: 46rem) { .plots { grid-template-columns: 1fr } }
"""
