import stat
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.errors import BaseError, LockError
from buildkit.recipe.lock import Deb, Lock
from buildkit.recipe.matrix import Base, Matrix, load_matrix
from buildkit.running.engine import Docker, LocalImage
from buildkit.supply.base import bootstrap, choose_provider, last_hook, preferences, public_mirror, resolve_base

ABSENT = "127.0.0.1:1/debian:bookworm-slim"  # no registry listens at this port
LOCKED = Lock(base=ABSENT, base_digest=f"sha256:{'1' * 64}", debs=(Deb("tini", "1", "2"),))


class EngineWithImages(Docker):
    """An engine that only knows which images it has."""

    def __init__(self, *references: str) -> None:
        self.references = references

    def find(self, reference: str) -> LocalImage | None:
        return LocalImage("sha256:0", 1) if reference in self.references else None


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildkit.supply.base.PATIENCE", 0.1)


@pytest.fixture
def base(matrix: Matrix) -> Base:
    return matrix.variant("cpu").base


def fake_mmdebstrap(folder: Path, script: str) -> None:
    path = folder / "mmdebstrap"
    asked_for_its_mirror = (
        'case "$*" in *--mode=chrootless*) echo "deb http://mirror.test/debian stable main"; exit 1;; esac'
    )
    path.write_text(f"#!/bin/sh\n{asked_for_its_mirror}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_local_image_is_preferred(base: Base) -> None:
    engine = EngineWithImages(LOCKED.base_reference)
    assert choose_provider(base, "auto", engine, LOCKED)[0] == "registry"


def test_base_that_is_not_locked_is_refused(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BaseError, match=f"the lock has no digest of {ABSENT}"):
        choose_provider(base, "auto", EngineWithImages(ABSENT), replace(LOCKED, base_digest=""))
    with pytest.raises(LockError, match="the lock has no Debian packages"):
        choose_provider(base, "bootstrap", EngineWithImages(), replace(LOCKED, debs=()))


def test_auto_gives_the_reason_for_bootstrapping(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mmdebstrap(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    provider, reason = choose_provider(base, "auto", EngineWithImages(), LOCKED)
    assert provider == "bootstrap"
    assert "127.0.0.1:1 did not answer" in reason


def test_error_without_a_base_provider_names_each_reason(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BaseError) as caught:
        choose_provider(base, "auto", EngineWithImages(), LOCKED)
    assert "127.0.0.1:1 did not answer" in str(caught.value)
    assert "mmdebstrap is not installed" in str(caught.value)


def test_failed_bootstrap_leaves_no_file(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mmdebstrap(tmp_path, 'for last; do :; done; /bin/echo half > "$last"; echo "E: no such mirror" >&2; exit 25')
    monkeypatch.setenv("PATH", str(tmp_path))
    cache = tmp_path / "cache"
    with pytest.raises(BaseError) as caught:
        bootstrap(load_matrix(project).variant("cpu"), cache, (), 0)
    assert "no such mirror" in str(caught.value)
    assert list((cache / "bases").iterdir()) == []


@pytest.fixture
def moved_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for mmdebstrap whose mirror has tini 2 alone; it notes each call in the file that is returned."""
    hook = """case $a in
    --customize-hook=download*) printf 'Package: tini\\nVersion: 2\\nSHA256: bb\\n' >"${a##* }";;
    */root.tar) echo tar >"$a";;
  esac"""
    fake_mmdebstrap(tmp_path, f"echo called >>{tmp_path}/calls\nfor a; do {hook}; done")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("buildkit.supply.base.ARCHIVE", "http://127.0.0.1:1")
    return tmp_path / "calls"


LOCKED_TINI = (Deb("tini", "1", "aa"),)


def test_mirror_without_the_locked_versions_is_named_with_a_fix(
    project: Path, tmp_path: Path, moved_mirror: Path
) -> None:
    with pytest.raises(LockError, match=r"has moved on from the lock of cpu-small: tini 1 -> 2") as caught:
        bootstrap(load_matrix(project).variant("cpu"), tmp_path / "cache", LOCKED_TINI, 0)
    assert "buildkit lock --upgrade-base --target cpu" in caught.value.hint
    assert list((tmp_path / "cache" / "bases").iterdir()) == []


def test_newer_packages_take_the_place_of_those_that_are_gone_and_are_kept_beside_the_locked_base(
    project: Path, tmp_path: Path, moved_mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    variant, cache = load_matrix(project).variant("cpu"), tmp_path / "cache"
    made = bootstrap(variant, cache, LOCKED_TINI, 0, only_locked=False)
    assert made.debs == (Deb("tini", "2", "bb"),)
    assert "tini 1 -> 2" in caplog.text
    assert "the image is not the one that was locked" in caplog.text
    assert bootstrap(variant, cache, LOCKED_TINI, 0, only_locked=False) == made
    assert moved_mirror.read_text() == "called\n", "a second build takes the same base"
    with pytest.raises(LockError, match="tini 1 -> 2"):
        bootstrap(variant, cache, LOCKED_TINI, 0)


def test_a_mirror_with_another_file_of_a_locked_version_is_never_used(
    project: Path, tmp_path: Path, moved_mirror: Path
) -> None:
    variant = load_matrix(project).variant("cpu")
    with pytest.raises(LockError, match="another file of tini 2"):
        bootstrap(variant, tmp_path / "cache", (Deb("tini", "2", "aa"),), 0, only_locked=False)
    assert list((tmp_path / "cache" / "bases").iterdir()) == []


def test_a_base_that_was_resolved_for_a_lock_is_the_one_of_the_next_build(
    project: Path, tmp_path: Path, moved_mirror: Path
) -> None:
    variant, cache = load_matrix(project).variant("cpu"), tmp_path / "cache"
    made = resolve_base(variant, cache, LOCKED_TINI, 0)
    assert bootstrap(variant, cache, made.debs, 0) == made
    assert moved_mirror.read_text() == "called\n"


def test_packages_that_a_mirror_no_longer_has_come_from_the_archive_of_the_locks_day(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake mmdebstrap has the locked version only when it gets the archive's sources after the tar."""
    fake_mmdebstrap(
        tmp_path,
        f"""case "$*" in *snapshot.debian.org*) version=1 sha=aa;; *) version=2 sha=bb;; esac
for a; do
  case $a in
    --customize-hook=download*) printf "Package: tini\\nVersion: $version\\nSHA256: $sha\\n" >"${{a##* }}";;
    */root.tar) echo tar >"$a";;
    deb*) echo "$a" >>{tmp_path}/sources;;
  esac
done""",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("requests.head", lambda *_, **__: None)  # the archive is not asked
    locked = (Deb("tini", "1", "aa"),)
    made = bootstrap(load_matrix(project).variant("cpu"), tmp_path / "cache", locked, 1795392000)
    assert made.debs == locked
    assert (tmp_path / "sources").read_text().splitlines() == [
        "deb https://snapshot.debian.org/archive/debian/20261123T235959Z bookworm main",
        "deb https://snapshot.debian.org/archive/debian/20261123T235959Z bookworm-updates main",
        "deb https://snapshot.debian.org/archive/debian-security/20261123T235959Z bookworm-security main",
    ]


def test_a_base_of_two_suites_takes_the_named_packages_from_the_second(matrix: Matrix) -> None:
    """Once locked, every package has its own version, from whichever suite."""
    variant = matrix.variant("rocm", "rocm-debian")
    assert variant.base.providers == ("bootstrap",)
    assert "librccl1" in preferences(variant, ())
    assert preferences(variant, ()).endswith("Pin: release a=experimental\nPin-Priority: 1001\n\n")
    locked = preferences(variant, (Deb("librccl1", "7.2.4-1", "aa"),))
    assert locked.startswith("Package: librccl1\nPin: version 7.2.4-1\nPin-Priority: 1002\n\n")
    assert preferences(matrix.variant("cpu"), ()) == ""


def test_the_base_names_debians_own_mirror_and_not_the_hosts(matrix: Matrix) -> None:
    """As the public image of the same base does, so that apt works in images that are built from ours."""
    hook = last_hook(matrix.variant("cpu"))
    assert f"URIs: {public_mirror()}/debian\nSuites: bookworm bookworm-updates\n" in hook
    assert f"URIs: {public_mirror()}/debian-security\nSuites: bookworm-security\n" in hook
    assert hook.index("rm -rf") < hook.index("cat >")
