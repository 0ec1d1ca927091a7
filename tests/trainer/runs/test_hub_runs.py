"""Whole runs over environments of hubs, whose rewards rise."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import pytest

from tests.trainer.experience.programs.hub_environments import DIGITS, DIGITS_GAME, PYTHON, needs_hubs, serving_game
from tests.trainer.runs.test_algorithm_runs import with_many_ends
from tests.trainer.whole_run import Runs

pytestmark = needs_hubs


def steps(runs: Runs, run_id: str, model: Path, *environment: str) -> Sequence[Mapping[str, float]]:
    """The metrics of each step of a run."""
    settings = {
        "model.path": model,
        "rollout.environment.python": PYTHON,
        "rollout.environment_timeout": 60,
        "rollout.engine": "transformers",
        "rollout.compare_freq": 1,
        "data.max_prompt_length": 128,
        "data.max_response_length": 64,
        "data.train_batch_size": 4,
        "rollout.samples_per_prompt": 8,
        "algorithm.advantage": "grpo",
        "algorithm.kl_coefficient": 0,
        "actor.learning_rate": 1e-2,
        "actor.mini_batch_size": 4,
        "trainer.nnodes": 1,
        "trainer.output_dir": runs.directory,
        "trainer.total_steps": 12,
        "trainer.test_freq": 0,
        "trainer.save_freq": 0,
    }
    run = runs.launch("train", run_id, settings, *environment)
    run.succeed()
    rows = run.metrics()[1:]
    for row in rows:
        assert row["rollout/failed"] == 0
        # Engine and trainer agree on every token, so both read the same conversation.
        assert row["rollout/log_prob_difference"] < 1e-3
    return rows


def rise(rows: Sequence[Mapping[str, float]], metric: str = "reward/mean") -> float:
    """The mean of the last three steps above that of the first three."""
    values = [row[metric] for row in rows]
    return mean(values[-3:]) - mean(values[:3])


def test_a_run_over_an_environment_of_verifiers_rises(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits.py").write_text(DIGITS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    rows = steps(runs, "verifiers", runs.model, "rollout.environment=verifiers:digits")
    assert rise(rows) > 0.1
    assert rise(rows, "reward/info/digits") == pytest.approx(rise(rows))


def test_a_run_over_an_environment_of_openenv_rises(runs: Runs, tmp_path: Path) -> None:
    with serving_game(DIGITS_GAME, tmp_path) as address:
        rows = steps(runs, "openenv", with_many_ends(runs, tmp_path), f"rollout.environment=openenv:{address}")
    assert rise(rows) > 0.1
    assert rows[0]["rollout/turns"] > 1
