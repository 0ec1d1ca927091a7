"""One self-contained page about a run: results, curves, where the time went, samples.

It is made from the files in the run's directory, so a report can be written again at any time, also of a run that was
cut short. The page has no script, no font and no address of its own.
"""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.errors import DataError
from trainer.records.files.run_files import RecordedRun, median, read_run
from trainer.records.pages.page import write_page
from trainer.records.pages.plots import (
    Plot,
    draw_group,
    draw_learning,
    draw_lines,
    draw_phases,
    draw_shares,
    draw_staleness,
    draw_tflops,
    draw_waterfall,
    figure_svg,
)
from trainer.records.waits import noticed

logger = logging.getLogger(__name__)

REPORT = "report.html"
PICTURES = (".png", ".svg", ".pdf")
Draw = Callable[[Axes, RecordedRun], None]
PLOTS: tuple[tuple[str, Draw, bool], ...] = (
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
USE: tuple[tuple[str, Draw, bool], ...] = (
    (
        "GPU utilisation",
        draw_shares(("gpu/utilization", "mean"), ("gpu/utilization_lowest", "least busy GPU")),
        False,
    ),
    ("Model FLOPs utilisation (MFU)", draw_group("mfu/"), False),
    ("TFLOP/s of a device", draw_tflops, False),
    (
        "Engines, shares",
        draw_shares(
            ("engines/busy", "busy"),
            ("engines/busy_lowest", "least busy engine"),
            ("engines/running_share", "of max_num_seqs"),
            ("engines/cache_usage", "cache in use"),
            ("engines/prefix_hits", "prefix hits"),
        ),
        False,
    ),
    ("Sampled tokens per second", draw_lines(("throughput/generated_tokens_per_second", "tokens")), False),
    ("Age of the tokens that a step learns from", draw_staleness, False),
    ("Seconds that workers waited for the slowest", draw_group("waiting/"), False),
    ("Seconds in which devices had no call to answer", draw_group("idle/"), False),
)
SLOWEST = 10  # workers that are named


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the run's directory and returns its path. Raises DataError."""
    run = read_run(run_dir)
    for note in run.notes:
        logger.warning("%s", note)
    write_page(
        run_dir / REPORT,
        "report.html.j2",
        title=run.name,
        facts=_facts(run),
        figures=_plots(PLOTS, run),
        use=_plots(USE, run),
        waits=_waits(run),
        samples=run.shown_samples(),
        extremes=[(run.extremes[0]["step"], run.extremes)] if run.extremes else [],
        settings=_settings(run),
    )
    return run_dir / REPORT


def save_learning_curve(run_dir: Path, path: Path) -> None:
    """Draws the rewards and the exact match of a run.

    Raises DataError if the suffix names no kind of picture, or if it cannot be written.
    """
    if path.suffix not in PICTURES:
        raise DataError(f"{path}: not a kind of picture", hint=f"its name may end in {', '.join(PICTURES)}")
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    draw_learning(figure.subplots(), read_run(run_dir))
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error}", hint="name another --curve") from error


def _plots(plots: Iterable[tuple[str, Draw, bool]], run: RecordedRun) -> list[Plot]:
    """The plots of which the run recorded something."""
    drawn = [Plot(title, _svg(draw, run, wide), wide) for title, draw, wide in plots]
    return [plot for plot in drawn if plot.svg]


def _svg(draw: Draw, run: RecordedRun, wide: bool) -> Markup:
    return Markup(figure_svg(lambda axes: draw(axes, run), wide))


def _waits(run: RecordedRun) -> list[tuple[str, str, str]]:
    """The workers for which others waited longest: name, seconds per step, and in how many steps it was the slowest."""
    steps = len(run.waits)
    waits = noticed(run.waits, sum(run.series("time/step")[1]))
    return [(wait.worker, f"{wait.seconds / steps:.2f}", f"{wait.steps} of {steps}") for wait in waits[:SLOWEST]]


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
