"""One self-contained page that sets runs side by side: curves, phases, samples, and where their settings differ."""

import html
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from trainer.errors import DataError
from trainer.records.atomic import atomic_file
from trainer.records.report import COLOURS, PHASES, STYLE, Run, figure_svg, median, read_run, sample_browser

# Shown where at least one run has measured it.
METRICS = (
    ("validation/exact_match", "Exact match, held-out, greedy"),
    ("validation/preference_accuracy", "Pairs in the right order, held-out"),
    ("reward/mean", "Reward of the samples"),
    ("reference/kl", "KL to the reference"),
    ("actor/entropy", "Entropy"),
    ("actor/clip_fraction", "Clip fraction"),
    ("actor/gradient_norm", "Gradient norm of the actor, before clipping"),
    ("rollout/response_length", "Response length, tokens"),
    ("rollout/log_prob_difference", "Largest log-prob difference, engine to trainer"),
    ("throughput/tokens_per_second", "Tokens per second"),
    ("time/step", "Seconds per step"),
)
FACTS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("steps", lambda run: f"{run.rows[-1]['step']:.0f}"),
    ("exact match, first → last", lambda run: _ends(run.series("validation/exact_match")[1])),
    ("reward, first → last", lambda run: _ends(run.series("reward/mean")[1])),
    ("seconds per step, median", lambda run: f"{median(run.series('time/step')[1]):.2f}"),
    ("tokens per second, median", lambda run: f"{median(run.series('throughput/tokens_per_second')[1]):,.0f}"),
)


def write_comparison(run_dirs: Sequence[Path], output: Path) -> Path:
    """Writes the page to `output` and returns its path. Raises DataError for a run without usable metrics."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    if len({run.name for run in runs}) < len(runs):
        raise DataError("two of the runs have the same name", hint="rename one of their directories")
    try:
        with atomic_file(output) as temporary:
            temporary.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error}", hint="name another --output") from error
    return output


def page(runs: Sequence[Run]) -> str:
    """The whole document."""
    title = html.escape(", ".join(run.name for run in runs))
    figures = [
        (name, figure_svg(partial(draw_metric, runs=runs, metric=metric), wide=False))
        for metric, name in METRICS
        if any(run.series(metric)[0] for run in runs)
    ]
    figures.append(("Where a step's time goes", figure_svg(partial(draw_phases, runs=runs), wide=True)))
    shown = "".join(
        f'<figure class="{"wide" if name.startswith("Where") else ""}"><figcaption>{name}</figcaption>{svg}</figure>'
        for name, svg in figures
    )
    samples = "".join(f"<h3>{html.escape(run.name)}</h3>{sample_browser(run.samples)}" for run in runs)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{title}</h1>{facts_table(runs)}<section class=plots>{shown}</section>"
        f"<h2>Where the settings differ</h2>{settings_table(runs)}<h2>What the models say</h2>{samples}</body></html>\n"
    )


def draw_metric(axes: Axes, runs: Sequence[Run], metric: str) -> None:
    """A line per run; a run has the same colour in every plot."""
    for colour, run in zip(_colours(runs), runs, strict=True):
        steps, values = run.series(metric)
        if steps:
            axes.plot(steps, values, color=colour, label=run.name, marker="." if metric.startswith("valid") else "")
    axes.set(xlabel="step")
    axes.legend(loc="best", frameon=False)


def draw_phases(axes: Axes, runs: Sequence[Run]) -> None:
    """The mean step of each run as one bar, made of its phases."""
    for place, run in enumerate(runs):
        rows = [row for row in run.rows if "time/step" in row]
        start = 0.0
        for colour, phase in zip(COLOURS, PHASES, strict=True):
            seconds = sum(row.get(f"time/{phase}", 0.0) for row in rows) / max(1, len(rows))
            label = phase.replace("_", " ") if place == 0 else None
            axes.barh(place, seconds, left=start, color=colour, label=label)
            start += seconds
        axes.text(start, place, f" {start:.2f} s", va="center")
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.set(xlabel="seconds, mean over all steps")
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def facts_table(runs: Sequence[Run]) -> str:
    rows = [(name, [fact(run) for run in runs]) for name, fact in FACTS]
    return _table(runs, rows)


def settings_table(runs: Sequence[Run]) -> str:
    """The settings that are not the same in all runs; where a run writes says nothing."""
    flat = [dict(_flat(run.config, "")) for run in runs]
    keys = sorted({key for settings in flat for key in settings} - {"trainer.output_dir", "trainer.run_id"})
    rows = [(key, [json.dumps(settings.get(key)) for settings in flat]) for key in keys]
    differing = [(key, values) for key, values in rows if len(set(values)) > 1]
    return _table(runs, differing) if differing else "<p>They do not.</p>"


def _table(runs: Sequence[Run], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    def line(tag: str, first: str, cells: Sequence[str]) -> str:
        inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in (first, *cells))
        return f"<tr>{inner}</tr>"

    head = line("th", "", [run.name for run in runs])
    return f"<table>{head}{''.join(line('td', name, cells) for name, cells in rows)}</table>"


def _flat(tree: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    leaves = []
    for key, value in tree.items():
        leaves += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return leaves


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3f} → {values[-1]:.3f}" if values else "not measured"


def _colours(runs: Sequence[Run]) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(len(runs))]
