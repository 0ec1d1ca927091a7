"""One self-contained page that compares runs: curves, phases, samples, and the settings that differ."""

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from markupsafe import Markup
from matplotlib.axes import Axes

from trainer.config.hydra import flattened
from trainer.errors import DataError
from trainer.records.files.run_files import RecordedRun, median, read_run
from trainer.records.pages.page import write_page
from trainer.records.pages.plots import COLOURS, PHASES, Plot, add_legend, draw_line, figure_svg, label_bar

logger = logging.getLogger(__name__)

# Shown if at least one run measured it.
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
FACTS: tuple[tuple[str, Callable[[RecordedRun], str]], ...] = (
    ("steps", lambda run: f"{run.rows[-1]['step']:.0f}"),
    ("exact match, first → last", lambda run: _ends(run.series("validation/exact_match")[1])),
    ("reward, first → last", lambda run: _ends(run.series("reward/mean")[1])),
    ("seconds per step, median", lambda run: f"{median(run.series('time/step')[1]):.2f}"),
    ("tokens per second, median", lambda run: f"{median(run.series('throughput/tokens_per_second')[1]):,.0f}"),
)


def write_comparison(run_dirs: Sequence[Path], output: Path) -> Path:
    """Writes the page and returns its path. Raises DataError for a run without usable metrics."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    for note in (note for run in runs for note in run.notes):
        logger.warning("%s", note)
    if len({run.name for run in runs}) < len(runs):
        raise DataError("two of the runs have the same name", hint="rename one of their directories")
    plots = [
        Plot(title, Markup(figure_svg(partial(draw_metric, runs=runs, metric=metric), wide=False)), wide=False)
        for metric, title in METRICS
        if any(run.series(metric)[0] for run in runs)
    ]
    time = Markup(figure_svg(partial(draw_phases, runs=runs), wide=True))
    write_page(
        output,
        "comparison.html.j2",
        title=", ".join(run.name for run in runs),
        runs=runs,
        facts=[(name, [fact(run) for run in runs]) for name, fact in FACTS],
        figures=[*plots, Plot("Time per step", time, wide=True)],
        settings=_differing_settings(runs),
    )
    return output


def draw_metric(axes: Axes, runs: Sequence[RecordedRun], metric: str) -> None:
    """A line per run, whose colour is the same in every plot."""
    for colour, run in zip(_colours(runs), runs, strict=True):
        steps, values = run.series(metric)
        if steps:
            draw_line(axes, steps, values, colour, run.name, "." if metric.startswith("valid") else "")
    axes.set(xlabel="step")
    add_legend(axes)


def draw_phases(axes: Axes, runs: Sequence[RecordedRun]) -> None:
    """One bar per run: its mean step, divided into phases."""
    for place, run in enumerate(runs):
        start = 0.0
        for colour, phase in zip(COLOURS, PHASES, strict=True):
            seconds = run.mean_seconds(phase)
            label = phase.replace("_", " ") if place == 0 else None
            axes.barh(place, seconds, left=start, color=colour, label=label)
            start += seconds
        label_bar(axes, start, place, start)
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.set(xlabel="seconds, mean over all steps")
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _differing_settings(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same in all runs, apart from where a run writes."""
    flat = [flattened("", run.config) for run in runs]
    keys = sorted({key for settings in flat for key in settings} - {"trainer.output_dir", "trainer.run_id"})
    rows = [(key, [json.dumps(settings.get(key)) for settings in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3f} → {values[-1]:.3f}" if values else "not measured"


def _colours(runs: Sequence[RecordedRun]) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(len(runs))]
