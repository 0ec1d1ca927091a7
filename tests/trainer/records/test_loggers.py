"""Weights & Biases and MLflow, writing to disk; if they are not installed, only the error."""

import importlib.util
from pathlib import Path

import pytest

from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.records.tracking import Tracker


def record(run_dir: Path, logger: str) -> None:
    with Tracker(run_dir, Config.model_validate({"trainer": {"loggers": [logger]}})) as tracker:
        for step in (1, 2):
            tracker.log(step, {"reward/mean": step / 10})


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    record(tmp_path / "run", "wandb")
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert content.count(b"reward/mean") >= 2
    assert b"learning_rate" in content


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_mlflow_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    record(tmp_path / "run", "mlflow")
    (written,) = (tmp_path / "mlruns").glob("*/*/metrics/reward/mean")
    assert [line.split()[1:] for line in written.read_text().splitlines()] == [["0.1", "1"], ["0.2", "2"]]


@pytest.mark.parametrize("logger", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_refused(tmp_path: Path, logger: str) -> None:
    if importlib.util.find_spec(logger) is not None:
        pytest.skip(f"{logger} is installed")
    with pytest.raises(ConfigError) as caught:
        record(tmp_path / "run", logger)
    assert f"trainer.loggers names {logger}, which is not installed" in str(caught.value)
    assert f"pip install {logger}" in caught.value.hint
