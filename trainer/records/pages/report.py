"""One self-contained page about a run: results, curves, where the time went, samples.

It is made from the files in the run's directory, so a report can be written again at any time, also of a run that was
cut short. The page has no script, no font and no address of its own.
"""

import json
from collections.abc import Callable
from pathlib import Path

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.records.files.run_files import RecordedRun, median, read_run
from trainer.records.pages.page import write_page
from trainer.records.pages.plots import Plot, draw_learning, draw_lines, draw_phases, draw_waterfall, figure_svg

REPORT = "report.html"
PLOTS: tuple[tuple[str, Callable[[Axes, RecordedRun], None], bool], ...] = (
    ("Learning", draw_learning, True),
    (
        "KL divergence",
        draw_lines(("reference/kl", "to the reference"), ("actor/approximate_kl", "of one step")),
        False,
    ),
    ("Entropy and clipping", draw_lines(("actor/entropy", "entropy"), ("actor/clip_fraction", "clip fraction")), False),
    ("Losses", draw_lines(("actor/policy_loss", "policy"), ("critic/value_loss", "value")), False),
    (
        "Gradients, before clipping",
        draw_lines(("actor/gradient_norm", "actor"), ("critic/gradient_norm", "critic")),
        False,
    ),
    ("Tokens per second", draw_lines(("throughput/tokens_per_second", "tokens")), False),
    ("Response length, tokens", draw_lines(("rollout/response_length", "tokens")), False),
    ("Time per phase", draw_waterfall, True),
    ("Time of each step", draw_phases, True),
)


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the run's directory and returns its path. Raises DataError."""
    run = read_run(run_dir)
    plots = [Plot(title, _svg(draw, run, wide), wide) for title, draw, wide in PLOTS]
    write_page(
        run_dir / REPORT,
        "report.html.j2",
        title=run.name,
        facts=_facts(run),
        figures=plots,
        samples=run.shown_samples(),
        extremes=[(run.extremes[0]["step"], run.extremes)] if run.extremes else [],
        settings=_settings(run),
    )
    return run_dir / REPORT


def save_learning_curve(run_dir: Path, path: Path) -> None:
    """Writes the curves of reward and exact match as a picture; the suffix of `path` names the format."""
    run = read_run(run_dir)
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        draw_learning(figure.subplots(), run)
        figure.savefig(path, dpi=150)


def _svg(draw: Callable[[Axes, RecordedRun], None], run: RecordedRun, wide: bool) -> Markup:
    return Markup(figure_svg(lambda axes: draw(axes, run), wide))


def _facts(run: RecordedRun) -> list[tuple[str, str]]:
    _, matches = run.series("validation/exact_match")
    _, seconds = run.series("time/step")
    _, tokens = run.series("throughput/tokens_per_second")
    _, differences = run.series("rollout/log_prob_difference")
    elapsed = run.rows[-1].get("wall_time", 0) - run.rows[0].get("wall_time", 0)
    return [
        ("exact match, first → last", f"{matches[0]:.1%} → {matches[-1]:.1%}" if matches else "not measured"),
        ("steps", f"{run.rows[-1]['step']:.0f}"),
        ("training time", f"{elapsed:.0f} s"),
        ("seconds per step, median", f"{median(seconds):.2f}"),
        ("tokens per second, median", f"{median(tokens):,.0f}"),
        ("largest log-prob difference, engine to trainer", f"{max(differences, default=0):.1e}"),
    ]


def _settings(run: RecordedRun) -> list[tuple[str, str]]:
    return [
        (f"{section}.{name}", json.dumps(value))
        for section, values in run.config.items()
        for name, value in values.items()
    ]
