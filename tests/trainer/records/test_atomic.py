"""Files and directories are complete or absent, and the old one stands until the new one does."""

from pathlib import Path

import pytest

from trainer.records.files import atomic
from trainer.records.files.atomic import atomic_directory, atomic_file, remove_remains


def fill(path: Path, text: str) -> None:
    with atomic_directory(path) as partial:
        (partial / "weights").write_text(text)


def content(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:  # as on NFS
        monkeypatch.setattr(atomic, "_exchange", lambda _one, _other: False)
    fill(tmp_path / "model", "old")
    fill(tmp_path / "model", "new")
    assert content(tmp_path / "model") == {"weights": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_old_directory_stands_again_if_the_new_one_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "model", "old")
    monkeypatch.setattr(atomic, "_exchange", lambda _one, _other: False)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError("the disk is gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        fill(tmp_path / "model", "new")
    assert content(tmp_path / "model") == {"weights": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_block_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "model", "old")
    (tmp_path / "config.json").write_text("old")
    with pytest.raises(FileExistsError), atomic_directory(tmp_path / "model") as partial:
        partial.mkdir()
    with pytest.raises(TypeError), atomic_file(tmp_path / "config.json") as temporary:
        temporary.write_text(1)  # type: ignore[arg-type]
    assert content(tmp_path / "model") == {"weights": "old"}
    assert (tmp_path / "config.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_two_writers_of_one_file_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "file") as first, atomic_file(tmp_path / "file") as other:
        assert first != other
        first.write_text("one")
        other.write_text("other")
    assert (tmp_path / "file").read_text() == "one"  # the last one to finish


def test_files_and_names_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(atomic, "sync", lambda path: synced.append(path.name.split(".")[-1]))
    with atomic_file(tmp_path / "run" / "config") as temporary:
        temporary.write_text("x")
    assert synced == ["partial", "run"]
    fill(tmp_path / "run" / "model", "new")
    assert synced == ["partial", "run", "weights", "partial", "run"]


def test_remains_of_dead_writers_are_removed(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "model") as partial:
        (tmp_path / "other").mkdir()
        remove_remains(tmp_path, "model.*")
        assert not partial.exists()
        partial.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]
