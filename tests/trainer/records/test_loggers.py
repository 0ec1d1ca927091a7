"""Weights & Biases, MLflow, SwanLab and Trackio as they are, writing to disk."""

import importlib.util
import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from tests.serving import serving
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.records import retrying
from trainer.records.tracking import Tracker

NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def record(run_dir: Path, logger: str, fails: bool = False) -> None:
    with Tracker(run_dir, Config.model_validate({"trainer": {"loggers": [logger]}})) as tracker:
        tracker.begin()
        for step in (1, 2):
            tracker.log(step, {"reward/mean": step / 10})
        if fails:
            raise RuntimeError("of the run")


@pytest.fixture(autouse=True)
def nobodys_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without keys, and no settings of the loggers."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def answering() -> Iterator[str]:
    """The address of a server that answers every request with 404."""
    with serving(HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@needs("wandb")
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


# Starts a record at a server of its own, which answers nothing any more once a step is sent, and ends as a run does.
SILENCED = """
import json, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from trainer import background, cli
from trainer.config.tree import Config
from trainer.records import retrying
from trainer.records.tracking import Tracker

background.EXIT_SECONDS = retrying.CLOSE_SECONDS = 3.0
silent = threading.Event()

class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        if silent.is_set():
            time.sleep(600)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        bucket = {"id": "x", "name": "run", "displayName": "run", "project": {"name": "p", "entity": {"name": "e"}}}
        viewer = {"id": "v", "username": "u", "email": "u@e", "entity": "e", "flags": "{}", "teams": {"edges": []}}
        found = {"viewer": viewer, "upsertBucket": {"bucket": bucket, "inserted": True}}
        content = json.dumps({"data": found}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    do_GET = do_POST

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()

def record(*_, **__):
    with Tracker(Path(sys.argv[2]), Config.model_validate({"trainer": {"loggers": ["wandb"]}})) as tracker:
        tracker.begin()
        silent.set()
        tracker.log(1, {"reward/mean": 0.5})
    return 7

cli.app = record
cli.run_process([])
"""


@needs("wandb")
def test_a_server_of_wandb_that_goes_silent_holds_no_run(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
        "WANDB_API_KEY": "0123456789" * 4,
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = [sys.executable, "-c", SILENCED, str(port), str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 7, done.stderr
    assert "recorded offline" not in done.stderr  # the server had answered
    assert "wandb: not done after 3 s, and left" in done.stderr
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["step"] == 1


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_mlflow_gets_every_step(tmp_path: Path) -> None:
    record(tmp_path / "run", "mlflow")
    (written,) = (tmp_path / "mlruns").glob("*/*/metrics/reward/mean")
    assert [line.split()[1:] for line in written.read_text().splitlines()] == [["0.1", "1"], ["0.2", "2"]]


class MlflowStandIn(BaseHTTPRequestHandler):
    """Stands in for an MLflow server: the five requests of its REST API that a record makes."""

    params: ClassVar[dict[str, str]] = {}
    metrics: ClassVar[list[tuple[int, str, float]]] = []
    status: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        experiment = {"experiment_id": "7", "name": "slipway", "lifecycle_stage": "active", "artifact_location": "/a"}
        self.answer({"experiment": experiment} if "get-by-name" in self.path else {})

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("log-batch"):
            self.params.update({entry["key"]: entry["value"] for entry in sent.get("params", ())})
            self.metrics.extend((int(entry["step"]), entry["key"], entry["value"]) for entry in sent.get("metrics", ()))
        if self.path.endswith("runs/update"):
            self.status.append(sent["status"])
        info = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "7", "status": "RUNNING", "start_time": 1}
        self.answer({"run": {"info": info, "data": {}}, "run_info": info})

    def answer(self, reply: object) -> None:
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_a_run_starts_while_a_stand_in_for_mlflows_server_is_away_and_sends_its_steps_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retrying, "RETRY_SECONDS", 0.05)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with Tracker(tmp_path / "run", Config.model_validate({"trainer": {"loggers": ["mlflow"]}})) as tracker:
        tracker.begin()
        tracker.log(1, {"reward/mean": 0.1})
        tracker.log(2, {"reward/mean": 0.2})
        assert f"nothing answers at http://127.0.0.1:{port}" in caplog.text
        server = HTTPServer(("127.0.0.1", port), MlflowStandIn)
        Thread(target=server.serve_forever, daemon=True).start()
    assert [(step, value) for step, name, value in MlflowStandIn.metrics if name == "reward/mean"] == [
        (1, 0.1),
        (2, 0.2),
    ]
    assert "actor.learning_rate" in MlflowStandIn.params
    assert MlflowStandIn.status == ["FINISHED"]
    server.shutdown()
    server.server_close()


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")  # mlflow's own
@pytest.mark.parametrize("address", ["htp://127.0.0.1:9", "http://"])
def test_a_malformed_address_of_mlflow_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match="mlflow, which cannot start"):
        record(tmp_path / "run", "mlflow")


@needs("swanlab")
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


def record_in_process(run_dir: Path, fails: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """Records with Trackio, which reads its variables when it is imported."""
    program = (
        f"from pathlib import Path; from {__name__} import record; record(Path({str(run_dir)!r}), 'trackio', {fails})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@needs("trackio")
def test_trackio_gets_every_step_beside_the_run(tmp_path: Path) -> None:
    done = record_in_process(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "trackio" / "slipway.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
        (config,) = database.execute("SELECT config FROM configs").fetchone()
    assert [(name, step, json.loads(metrics)["reward/mean"]) for name, step, metrics in rows] == [
        ("run", 1, 0.1),
        ("run", 2, 0.2),
    ]
    assert json.loads(config)["actor"]["learning_rate"] > 0


@needs("trackio")
def test_trackio_shows_that_a_run_failed(tmp_path: Path) -> None:
    done = record_in_process(tmp_path / "run", fails=True)
    assert "RuntimeError: of the run" in done.stderr
    with sqlite3.connect(tmp_path / "trackio" / "slipway.db") as database:
        assert database.execute("SELECT title, level FROM alerts").fetchall() == [("the run failed", "error")]


@needs("trackio")
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TRACKIO_SPACE_ID": "me/runs", "HF_ENDPOINT": NOBODY}, f"nothing answers at {NOBODY}"),
        ({"TRACKIO_SERVER_URL": NOBODY}, "Self-hosted logging requires a write token"),
    ],
)
def test_a_place_that_trackio_cannot_write_to_is_refused(
    tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    done = record_in_process(tmp_path / "run", **variables)
    assert done.returncode != 0
    assert f"ConfigError: trainer.loggers names trackio, which cannot start: {message}" in done.stderr


@pytest.mark.parametrize("logger", ["wandb", "mlflow", "swanlab", "trackio"])
def test_a_logger_that_is_not_installed_is_refused(tmp_path: Path, logger: str) -> None:
    if importlib.util.find_spec(logger) is not None:
        pytest.skip(f"{logger} is installed")
    with pytest.raises(ConfigError) as caught:
        record(tmp_path / "run", logger)
    assert f"trainer.loggers names {logger}, which is not installed" in str(caught.value)
    assert f"pip install {logger}" in caught.value.hint
