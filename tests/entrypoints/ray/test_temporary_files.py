"""Where Ray's workers keep temporary files, and what they compile."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoints.ray.node import temporary_files

USER = f"slipway-test-{os.getpid()}"
CACHE = Path(f"/tmp/torchinductor_{USER}")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    if CACHE.is_symlink():
        CACHE.unlink()
    elif CACHE.exists():
        CACHE.rmdir()


def test_compiled_code_stays_where_it_would_be(tmp_path: Path) -> None:
    assert temporary_files({"USER": USER}, tmp_path) == {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(CACHE)}
    assert CACHE.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["a link", "a folder that others can write"])
def test_code_that_others_may_have_put_there_is_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trap: str
) -> None:
    if trap == "a link":
        CACHE.symlink_to(tmp_path)
    else:
        CACHE.mkdir()
        CACHE.chmod(0o777)
    cache = temporary_files({"USER": USER}, tmp_path)["TORCHINDUCTOR_CACHE_DIR"]
    assert cache == str(tmp_path / CACHE.name)
    assert "compiled code is kept during this job only" in caplog.text


def test_the_users_directory_is_kept(tmp_path: Path) -> None:
    assert temporary_files({"USER": USER, "TMPDIR": "/scratch"}, tmp_path) == {}
    assert not CACHE.exists()
