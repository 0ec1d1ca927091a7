"""The Ray cluster that a run starts on its machine ends with it, and its failures are one message."""

import fcntl
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.exceptions import RaySystemError

from trainer.cluster import connection
from trainer.cluster.connection import LOGS, connected
from trainer.errors import DataError, WorkerError

PREFIX = "slipway-run-"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A parent for Ray's files whose path is short enough."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as directory:
        monkeypatch.setenv("RAY_TMPDIR", directory)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(connection, "read_ray_address", lambda: None)
        yield Path(directory)


class Session:
    """Stands in for Ray: makes the files that a session has, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.ended = failure, 0
        self.directory = Path()
        self.environment: dict[str, str] = {}
        self.blocked: set[signal.Signals] = set()

    def init(self, _address: str, **settings: object) -> None:
        self.directory = Path(str(settings["_temp_dir"]))
        self.environment = dict(os.environ)
        self.blocked = set(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        logs = self.directory / "session_2026_1" / "logs"
        logs.mkdir(parents=True)
        (logs / "worker-1.err").write_text("why it died")
        (logs / "worker-1.out").touch()
        (logs / "elsewhere").symlink_to("/etc/hostname")
        if self.failure is not None:
            raise self.failure

    def shutdown(self) -> None:
        self.ended += 1


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    stand_in = Session()
    monkeypatch.setattr(ray, "init", stand_in.init)
    monkeypatch.setattr(ray, "shutdown", stand_in.shutdown)
    return stand_in


def test_a_stand_in_for_ray_that_is_too_slow_to_start_is_one_message(
    place: Path, session: Session, tmp_path: Path
) -> None:
    """Ray raises a plain Exception then."""
    session.failure = Exception("The current node timed out during startup.")
    with (
        pytest.raises(WorkerError, match="cannot reach Ray at this machine: The current node timed out") as caught,
        connected(tmp_path / "run"),
    ):
        pytest.fail("it did not start")
    assert "on a machine that is busy, try again" in caught.value.hint
    assert list(place.iterdir()) == []
    assert session.ended == 1  # also of what had started


def test_a_failure_of_a_stand_in_for_ray_during_a_run_is_one_message(
    place: Path, session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(WorkerError, match=r"Ray failed: RaySystemError: System error: the GCS is gone$"),
        connected(tmp_path / "run"),
    ):
        raise RaySystemError("the GCS is gone\nand a traceback")
    (kept,) = (tmp_path / "run" / LOGS).iterdir()
    assert {file.name: file.read_text() for file in kept.iterdir()} == {"worker-1.err": "why it died"}
    assert f"Ray's logs of the failed run are in {kept}" in caplog.text
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("error", [None, DataError("the user can fix it")])
def test_nothing_of_a_stand_in_for_ray_is_left_of_other_runs(
    place: Path, session: Session, tmp_path: Path, error: Exception | None
) -> None:
    try:
        with connected(tmp_path / "run"):
            (directory,) = place.iterdir()
            assert directory.stat().st_mode & 0o777 == 0o700
            if error:
                raise error
    except DataError:
        assert error
    assert session.ended == 1
    assert list(place.iterdir()) == list(tmp_path.glob("run")) == []


def test_workers_get_temporary_files_of_the_run_and_outlive_its_terminal(
    place: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with connected():
        assert Path(session.environment["TMPDIR"]).is_relative_to(place)
        assert not Path(session.environment["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(place)  # the next run needs it
        assert signal.SIGHUP in session.blocked
        assert "TMPDIR" not in os.environ
        assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_directories_of_killed_runs_are_removed_and_those_of_others_stay(place: Path, session: Session) -> None:
    (place / f"{PREFIX}dead").mkdir()
    alive = place / f"{PREFIX}alive"
    alive.mkdir()
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (place / f"{PREFIX}link").symlink_to("/etc")
    with connected():
        pass
    os.close(lock)
    assert sorted(path.name for path in place.iterdir()) == [f"{PREFIX}alive", f"{PREFIX}link"]


def test_a_stand_in_for_ray_that_does_not_end_is_left_and_named(
    place: Path, session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()
    monkeypatch.setattr(ray, "shutdown", never.wait)
    monkeypatch.setattr(connection, "SHUTDOWN_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING), connected():
        pass
    never.set()
    assert "Ray does not answer: this process ends without disconnecting from it" in caplog.text
    assert list(place.iterdir()) == []
    never.set()


def test_processes_of_the_cluster_that_are_left_are_killed_and_no_others(
    place: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        with connected():
            left = subprocess.Popen(["sh", "-c", "sleep 600; :", "sh", str(session.directory)])
            while not psutil.Process(left.pid).children():
                pass
            child = psutil.Process(left.pid).children()[0]
        left.wait(10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
