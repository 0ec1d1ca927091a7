"""Plots show every point, those of runs with a single step as well."""

import io
import math
from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from trainer.records.files.run_files import RecordedRun
from trainer.records.pages.comparison import draw_metric
from trainer.records.pages.plots import COLOURS, draw_learning, draw_lines, draw_phases


def pixels(draw: Callable[[Axes], None], colour: str) -> int:
    """How many pixels of a plot have nearly this colour, apart from its legend."""
    figure = Figure(figsize=(5, 3), dpi=100)
    axes = figure.subplots()
    draw(axes)
    if (legend := axes.get_legend()) is not None:
        legend.remove()
    content = io.BytesIO()
    figure.savefig(content, format="rgba")
    image = np.frombuffer(content.getvalue(), np.uint8).reshape(300, 500, 4)[..., :3] / 255
    return int((np.abs(image - to_rgb(colour)).max(axis=-1) < 0.1).sum())


def run_of(*values: float) -> RecordedRun:
    rows = [{"step": step, "reward/mean": value, "time/step": 1.0} for step, value in enumerate(values, start=1)]
    return RecordedRun("run", [{**row, "time/generate": 0.6} for row in rows], [], {})


@pytest.mark.parametrize("values", [(0.5,), (math.nan, 0.5), (0.5, math.nan, 0.7, math.nan), (0.5, 0.7)])
def test_every_point_is_visible(values: tuple[float, ...]) -> None:
    run = run_of(*values)
    for draw in (draw_learning, draw_lines(("reward/mean", "reward"))):
        assert pixels(lambda axes, draw=draw: draw(axes, run), COLOURS[0]) > 5
    assert pixels(lambda axes: draw_metric(axes, [run, run_of(0.1)], "reward/mean"), COLOURS[0]) > 5
    assert pixels(lambda axes: draw_metric(axes, [run, run_of(0.1)], "reward/mean"), COLOURS[1]) > 5


@pytest.mark.parametrize("steps", [1, 2])
def test_the_phases_of_a_single_step_are_visible(steps: int) -> None:
    assert pixels(lambda axes: draw_phases(axes, run_of(*[0.5] * steps)), COLOURS[1]) > 1000
