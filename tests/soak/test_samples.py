"""What a soak measures."""

import os
from math import isnan
from pathlib import Path

import pytest

from tests.soak.report import grown
from tests.soak.samples import growth, kind_of, sample


def test_growth_is_the_median_slope_within_stretches() -> None:
    steady = ([0.0, 10.0, 20.0, 30.0], [100.0, 101.0, 102.0, 103.0])
    after_a_restart = ([50.0, 60.0, 70.0, 80.0], [20.0, 21.0, 500.0, 23.0])  # one value is off
    level, slope = growth([steady, after_a_restart])
    assert slope == pytest.approx(360)
    assert 20 <= level <= 103
    assert isnan(growth([])[1])


def test_only_what_still_grows_in_the_later_half_of_a_stretch_is_a_problem() -> None:
    def held(at: float) -> dict[str, float]:
        return {"filling, MiB": 100 + min(at, 600) / 10, "leaking, MiB": 100 + at / 10}

    samples = [{"stretch": 50.0, "seconds": 50.0 + at, **held(at)} for at in range(0, 1300, 10)]
    problems: list[str] = []
    assert grown("filling, MiB", samples, "synchronous", problems) == "160, +0.0"
    grown("leaking, MiB", samples, "synchronous", problems)
    assert problems == ["synchronous: leaking, MiB grows by 360.0 an hour"]


def test_a_sample_counts_processes_descriptors_and_files(tmp_path: Path) -> None:
    before = sample([os.getpid()], [])
    (tmp_path / "new").write_bytes(b"x" * 2**20)
    with (tmp_path / "new").open("rb"):
        after = sample([os.getpid(), 2**22 - 1], [tmp_path])  # the second process does not exist
    assert (after["processes"], after["descriptors"] - before["descriptors"]) == (1, 1)
    assert (after["files in /tmp and /dev/shm"], after["their size, MiB"]) == (1, 1)
    assert sum(value for name, value in after.items() if name.endswith(", MiB")) > 10


def test_processes_are_told_apart_by_ray_s_titles() -> None:
    assert kind_of("ray::ActorWorke ray::ActorWorker.update") == "actor"
    assert kind_of("raylet /opt/raylet --x") == "raylet, GCS"
    assert kind_of("python /opt/slipway/venv/bin/python -m trainer train") == "controller"
    assert kind_of("sh -c true") == "others"
