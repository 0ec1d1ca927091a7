"""Weights & Biases, MLflow and SwanLab as they are, writing to disk."""

import importlib.util
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.records.tracking import Tracker

NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens


def record(run_dir: Path, logger: str) -> None:
    with Tracker(run_dir, Config.model_validate({"trainer": {"loggers": [logger]}})) as tracker:
        for step in (1, 2):
            tracker.log(step, {"reward/mean": step / 10})


@pytest.fixture(autouse=True)
def nobodys_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without keys, and no settings of the loggers."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def answering() -> Iterator[str]:
    """The address of a server that answers every request with 404."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.parametrize("someone_answers", [False, True])
def test_wandb_records_offline_without_a_server_or_a_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answering: str,
    someone_answers: bool,
) -> None:
    import wandb

    wandb.teardown()  # settings are read once per process
    monkeypatch.setenv("WANDB_BASE_URL", answering if someone_answers else NOBODY)
    if not someone_answers:
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    record(tmp_path / "run", "wandb")
    wandb.teardown()
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert content.count(b"reward/mean") >= 2
    assert b"learning_rate" in content
    assert ("no API key is set" if someone_answers else f"nothing answers at {NOBODY}") in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_mlflow_gets_every_step(tmp_path: Path) -> None:
    record(tmp_path / "run", "mlflow")
    (written,) = (tmp_path / "mlruns").glob("*/*/metrics/reward/mean")
    assert [line.split()[1:] for line in written.read_text().splitlines()] == [["0.1", "1"], ["0.2", "2"]]


@pytest.mark.skipif(importlib.util.find_spec("swanlab") is None, reason="swanlab is not installed")
@pytest.mark.parametrize("key", [None, "0123456789" * 4])
def test_swanlab_records_offline_without_a_key_or_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str | None
) -> None:
    monkeypatch.setenv("SWANLAB_API_HOST", NOBODY)
    if key:
        monkeypatch.setenv("SWANLAB_API_KEY", key)
    record(tmp_path / "run", "swanlab")
    content = b"".join(file.read_bytes() for file in (tmp_path / "run" / "swanlab").rglob("*") if file.is_file())
    assert content.count(b"reward/mean") >= 2
    assert (f"nothing answers at {NOBODY}" if key else "no API key is set") in caplog.text


@pytest.mark.parametrize("logger", ["wandb", "mlflow", "swanlab"])
def test_a_logger_that_is_not_installed_is_refused(tmp_path: Path, logger: str) -> None:
    if importlib.util.find_spec(logger) is not None:
        pytest.skip(f"{logger} is installed")
    with pytest.raises(ConfigError) as caught:
        record(tmp_path / "run", logger)
    assert f"trainer.loggers names {logger}, which is not installed" in str(caught.value)
    assert f"pip install {logger}" in caught.value.hint
