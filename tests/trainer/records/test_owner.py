"""One writer per run directory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import ConfigError, LostRunError, RemovedRunError
from trainer.records.files import owner
from trainer.records.files.owner import OWNER, RunOwner


def test_a_second_writer_is_refused_and_the_next_one_is_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunOwner(run):
        (run / "metrics.jsonl").touch()
        with (
            pytest.raises(ConfigError, match=rf"process {os.getpid()} on \S+ writes into this directory"),
            RunOwner(run),
        ):
            pass
    with RunOwner(run):
        pass
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def test_a_directory_without_records_is_removed(tmp_path: Path) -> None:
    with RunOwner(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_a_writer_that_was_killed_is_followed_at_once(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from trainer.records.files.owner import RunOwner\n"
        "RunOwner(Path(sys.argv[1])).__enter__(); os.kill(os.getpid(), 9)"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert (tmp_path / OWNER).read_text()
    with RunOwner(tmp_path, watch=lambda _: pytest.fail("nothing to wait for")):
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("with_locks", [True, False])
def test_between_nodes_the_heartbeat_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_locks: bool) -> None:
    """The other node's lock is invisible here."""
    monkeypatch.setattr(owner, "_lock", lambda _: True if with_locks else None)
    there = {"host": "other", "pid": 7, "boot": "elsewhere", "id": "x"}
    (tmp_path / OWNER).write_text(json.dumps(there))
    looks: list[float] = []

    def beating(seconds: float) -> None:
        looks.append(seconds)
        os.utime(tmp_path / OWNER)

    with pytest.raises(ConfigError, match="process 7 on other writes"), RunOwner(tmp_path, watch=beating):
        pass
    assert len(looks) == 1
    monkeypatch.setattr(owner, "SILENT_SECONDS", 0.01)
    with RunOwner(tmp_path, watch=looks.append):
        pass
    assert len(looks) > 1


def test_a_writer_whose_directory_was_taken_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.01)
    with RunOwner(tmp_path) as mine:
        mine.check()
        (tmp_path / OWNER).write_text(json.dumps({"host": "other", "pid": 7, "id": "x"}))
        mine._thread.join(10)
        with pytest.raises(LostRunError, match="process 7 on other writes there now"):
            mine.check()
    assert (tmp_path / OWNER).exists()  # it is the other's


@pytest.mark.parametrize("how", ["removed", "its parent removed", "moved", "replaced", "emptied"])
def test_a_writer_whose_directory_is_gone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.01)
    run = tmp_path / "runs" / "run"
    with RunOwner(run) as mine:
        mine.check()
        if how == "its parent removed":
            shutil.rmtree(run.parent)
        elif how == "moved":
            run.rename(run.with_name("elsewhere"))
        elif how == "emptied":
            for path in run.iterdir():
                path.unlink()
        else:
            shutil.rmtree(run)
        if how == "replaced":
            run.mkdir()
        mine._thread.join(10)
        with pytest.raises(RemovedRunError, match=f"{run}: removed, moved or emptied while the run wrote there"):
            mine.check()


def test_a_file_system_that_is_away_for_a_while_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was mounted, the directory of another file system stands meanwhile."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.01)
    run = tmp_path / "run"
    with RunOwner(run) as mine:
        mine._device += 1
        run.rename(tmp_path / "away")
        mine._thread.join(0.2)
        mine.check()
        (tmp_path / "away").rename(run)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/run: cannot be written"), RunOwner(tmp_path / "file" / "run"):
        pass
