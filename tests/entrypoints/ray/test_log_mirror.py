"""Ray's logs reach the log directory while they grow."""

from pathlib import Path

import pytest

from entrypoints.ray.log_mirror import LogMirror


def test_new_bytes_are_appended(tmp_path: Path) -> None:
    source = tmp_path / "logs" / "old" / "raylet.out"
    source.parent.mkdir(parents=True)
    mirror = LogMirror(tmp_path / "logs", tmp_path / "kept")
    copy = tmp_path / "kept" / "old" / "raylet.out"
    source.write_text("one\n")
    mirror.update()
    assert copy.read_text() == "one\n"
    with source.open("a") as file:
        file.write("two\n")
    mirror.update()
    mirror.update()
    assert copy.read_text() == "one\ntwo\n"


def test_a_rotated_file_starts_anew(tmp_path: Path) -> None:
    source = tmp_path / "logs" / "gcs.out"
    source.parent.mkdir()
    mirror = LogMirror(tmp_path / "logs", tmp_path / "kept")
    source.write_text("a long line\n")
    mirror.update()
    source.rename(source.with_name("gcs.out.1"))
    source.write_text("new\n")
    mirror.update()
    assert (tmp_path / "kept" / "gcs.out").read_text() == "new\n"
    assert (tmp_path / "kept" / "gcs.out.1").read_text() == "a long line\n"


def test_a_folder_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gcs.out").write_text("x")
    (tmp_path / "kept").touch()
    mirror = LogMirror(tmp_path / "logs", tmp_path / "kept")
    mirror.update()
    mirror.update()
    assert [record.message for record in caplog.records if "cannot keep Ray's logs" in record.message][1:] == []
    assert "cannot keep Ray's logs in" in caplog.text
