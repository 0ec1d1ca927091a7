"""`install-wheels`, which makes the layers of wheels, resumes interrupted downloads."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from docker.models.containers import Container

INSTALLER = Path(__file__).resolve().parents[2] / "images" / "templates" / "install-wheels"
BREAKS_OFF = """#!/bin/sh
echo "uv $*"
case " $* " in
  *" --link-mode hardlink "*) mkdir /tmp/cache && echo half >/tmp/cache/downloaded ;;
  *" --link-mode copy "*) cat /tmp/cache/downloaded ;;
esac
exit 2
"""


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """The mounts of a build, with a uv whose downloads are interrupted."""
    for folder in ("cache", "tools", "wheels"):
        (tmp_path / folder).mkdir()
    for name in ("host.env", "prune.txt", "source-only.txt"):
        (tmp_path / name).touch()
    (tmp_path / "requirements.txt").write_text("six==1.17.0\n")
    (tmp_path / "install-wheels").write_text(INSTALLER.read_text())
    (tmp_path / "tools" / "uv").write_text(BREAKS_OFF)
    for program in ("install-wheels", "tools/uv"):
        (tmp_path / program).chmod(0o755)
    return tmp_path


def install(start: Callable[..., Container], mounted: Path) -> str:
    """What `install-wheels` says."""
    container = start(
        "3",
        entrypoint="/run/slipway/install-wheels",
        volumes=[f"{mounted}:/run/slipway"],
        user=f"{os.getuid()}:{os.getgid()}",
    )
    assert container.wait(timeout=60)["StatusCode"] == 2
    return str(container.logs().decode())


def test_the_next_build_resumes_a_broken_download(start: Callable[..., Container], mounted: Path) -> None:
    first = install(start, mounted)
    assert "hardlink" in first, first
    assert "--only-binary :all:" in first, "a mirror that hides a wheel makes uv build a source archive, as root"
    assert (mounted / "cache" / "uv" / "downloaded").read_text() == "half\n"
    second = install(start, mounted)
    assert "hardlink" not in second, second
    assert "half" in second


def test_an_interrupted_copy_of_downloads_is_not_used(start: Callable[..., Container], mounted: Path) -> None:
    (mounted / "cache" / "uv.partial").mkdir()
    (mounted / "cache" / "uv.partial" / "damaged").touch()
    assert "hardlink" in install(start, mounted)
    assert [path.name for path in (mounted / "cache").rglob("*")] == ["uv", "downloaded"]
