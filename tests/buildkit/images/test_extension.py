"""The lock of a user's additions, and what they put into the build context. apt is mocked; the wheels are stand-ins."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from buildkit.errors import ExtensionError, LockError
from buildkit.host.settings import HostSettings, read_host
from buildkit.images.build import BuildOptions, image_tags, prepared
from buildkit.images.context import stage_extension
from buildkit.images.extension import lock_extension, read_extension_lock
from buildkit.images.packages import MirrorMovedError, PackageSource
from buildkit.images.parent import OWN_STAGE, Parent, find_parent
from buildkit.images.plan import make_plan
from buildkit.recipe.dockerfile import image_labels, image_manifest
from buildkit.recipe.extension import read_extension
from buildkit.recipe.lock import Deb, Lock, PackageChange, parse_lock
from buildkit.recipe.matrix import load_matrix
from buildkit.running.engine import ContainerEngine, Docker, LocalImage
from tests.buildkit.stand_ins import Index, StandIn, write_wheel
from tests.serving import serving

LOCK = parse_lock("# epoch: 1795824000\n")


class MockedApt(PackageSource):
    """A mirror whose packages all have one version, held in a file so that it can move on."""

    def newest(self, names: Iterable[str]) -> tuple[tuple[Deb, ...], int]:
        return tuple(Deb(name, self.now, "a" * 64) for name in names), 1000

    def files(self, debs: Iterable[Deb]) -> tuple[Path, ...]:
        locked = tuple(debs)
        if moved := [deb.name for deb in locked if deb.version != self.now]:
            raise MirrorMovedError(f"the mirror has other files of {', '.join(moved)} than were locked")
        return tuple(self.cache / f"{deb.name}.deb" for deb in locked)

    @property
    def now(self) -> str:
        return (self.cache / "version").read_text()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostSettings]:
    (tmp_path / "wheels").mkdir()
    for version in ("1.0", "2.0"):
        write_wheel(StandIn("plain", version, "py3-none-any"), tmp_path / "wheels")
    with serving(Index(tmp_path / "wheels")) as index:
        yield replace(read_host({}, tmp_path, tmp_path), default_index=index.address)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder with additions of every kind."""
    home = tmp_path / "home"
    (home / "mine").mkdir(parents=True)
    (home / "mine" / "code.py").write_text("VALUE = 1\n")
    (home / "requirements.txt").write_text("plain>=1\n")
    text = '[extend]\nwith = ["requirements.txt"]\napt = ["jq"]\ncopy = ["mine"]\n'
    (home / "slipway.toml").write_text(text)
    return home


@pytest.fixture
def source(project: Path, home: Path, host: HostSettings, tmp_path: Path) -> Callable[..., PackageSource]:
    """The source of packages, with slipway.toml as it is at that time."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "version").write_text("1.6")
    (cache / "jq.deb").write_text("")

    def source(lock: Lock = LOCK) -> PackageSource:
        matrix = load_matrix(project, home / "slipway.toml")
        engine = cast(ContainerEngine, None)
        return MockedApt(matrix, matrix.variant("cpu"), lock, engine, host, "bootstrap", cache)

    return source


def locked(source: PackageSource, **options: bool) -> dict[str, str]:
    extension = lock_extension(source, **options)
    assert extension is not None
    return extension.lock.versions | {deb.name: deb.version for deb in extension.lock.debs}


def test_the_lock_lies_beside_the_file_and_stays(source: Callable[..., PackageSource], home: Path) -> None:
    (home / "requirements.txt").write_text("plain<2\n")
    assert locked(source()) == {"plain": "1.0", "jq": "1.6"}
    path = home / "slipway-locks" / "cpu" / "small-extended.txt"
    text = path.read_text()
    assert f"# base: slipway:cpu-small sha256:{LOCK.digest}\n" in text
    assert "127.0.0.1" not in text, "no lock names an index"
    assert locked(source(), locked=True) == {"plain": "1.0", "jq": "1.6"}
    assert path.read_text() == text


def test_what_still_fits_stays_until_an_upgrade(source: Callable[..., PackageSource], home: Path) -> None:
    (home / "requirements.txt").write_text("plain<2\n")
    locked(source())
    (home / "requirements.txt").write_text("plain\n")
    assert locked(source()) == {"plain": "1.0", "jq": "1.6"}
    assert locked(source(), upgrade=True) == {"plain": "2.0", "jq": "1.6"}


@pytest.mark.parametrize("change", ["requirements", "lock of the image", "missing"])
def test_locked_refuses_a_lock_that_is_not_current(
    source: Callable[..., PackageSource], home: Path, change: str
) -> None:
    if change != "missing":
        locked(source())
    if change == "requirements":
        (home / "requirements.txt").write_text("plain>1\n")
    other = parse_lock("# epoch: 1\n") if change == "lock of the image" else LOCK
    with pytest.raises(LockError, match="is missing" if change == "missing" else "was made for other") as caught:
        lock_extension(source(other), locked=True)
    assert "buildkit lock --target cpu" in caught.value.hint


def test_a_mirror_that_moved_on_renews_the_packages_alone(
    source: Callable[..., PackageSource], home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "requirements.txt").write_text("plain<2\n")
    locked(source())
    (home / "requirements.txt").write_text("plain<2\n# the same\n")
    (tmp_path / "cache" / "version").write_text("1.7")
    with pytest.raises(LockError, match="other files of jq"):
        lock_extension(source(), locked=True)
    assert locked(source()) == {"plain": "1.0", "jq": "1.7"}
    assert "resolving the Debian packages again" in caplog.text
    assert locked(source(), locked=True) == {"plain": "1.0", "jq": "1.7"}


def test_options_alone_are_resolved_each_time_and_leave_no_file(
    source: Callable[..., PackageSource], home: Path
) -> None:
    (home / "slipway.toml").write_text("")
    plain = source()
    variant = plain.variant.extended(read_extension([home / "requirements.txt"], (), ()))
    assert locked(replace(plain, variant=variant)) == {"plain": "2.0"}
    assert not (home / "slipway-locks").exists()
    with pytest.raises(LockError, match="has no lock") as caught:
        lock_extension(replace(plain, variant=variant), locked=True)
    assert "slipway.toml" in caught.value.hint


def test_folders_alone_need_no_lock(source: Callable[..., PackageSource], home: Path) -> None:
    (home / "slipway.toml").write_text('[extend]\ncopy = ["mine"]\n')
    assert locked(source(), locked=True) == {}
    assert not (home / "slipway-locks").exists()


def test_a_second_nccl_is_refused(source: Callable[..., PackageSource], home: Path, tmp_path: Path) -> None:
    second = StandIn("second", "1.0", "py3-none-any", libraries=("nvidia/libnccl.so.2",))
    write_wheel(second, tmp_path / "wheels")
    (home / "requirements.txt").write_text("second\n")
    text = "# wheel: nvidia-nccl-cu13 1 0\n# library: libnccl.so.2 nvidia-nccl-cu13\n"
    with pytest.raises(ExtensionError, match=r"cpu-small fails the check `one NCCL or RCCL`.*second"):
        lock_extension(source(parse_lock(text)))


# ---- the image ----


def staged(source: PackageSource, context: Path, parent: Parent) -> str:
    extension = lock_extension(source)
    assert extension is not None
    return stage_extension(context, source.matrix, source.variant, source.lock, extension, parent, source.host)


def test_the_image_describes_what_was_added(source: Callable[..., PackageSource], tmp_path: Path) -> None:
    context = tmp_path / "context"
    staged(source(), context, Parent(OWN_STAGE, "bootstrap"))
    manifest: dict[str, Any] = json.loads((context / "extension" / "image.json").read_text())
    assert manifest["pins"] == {"plain": "2.0"}
    assert manifest["lock"] == f"sha256:{LOCK.digest}", "the lock of the image is not the extension's"
    assert manifest["status"] == "untested"
    assert manifest["extension"]["requirements"] == ["plain>=1"]
    assert manifest["extension"]["packages"] == ["jq"]
    assert manifest["extension"]["folders"].keys() == {"mine"}
    assert (context / "extension" / "folders" / "mine" / "code.py").read_text() == "VALUE = 1\n"
    assert (context / "extension" / "constraints.txt").read_text() == "plain==2.0\n"
    assert "plain==2.0" in (context / "extension" / "extension.txt").read_text()


def test_the_layers_lie_above_all_others(source: Callable[..., PackageSource], tmp_path: Path) -> None:
    text = staged(source(), tmp_path / "context", Parent(OWN_STAGE, "bootstrap"))
    assert [line.split()[0] for line in text.splitlines() if line[:1].isupper()] == [
        "FROM",
        "RUN",
        "RUN",
        "COPY",
        "COPY",
        "LABEL",
    ]
    assert "FROM image AS extended\n" in text
    assert "org.opencontainers.image.revision" in text


def test_an_image_that_somebody_built_keeps_its_own_commit(
    source: Callable[..., PackageSource], tmp_path: Path
) -> None:
    text = staged(source(), tmp_path / "context", Parent("registry.example.com/slipway@sha256:1", "registry"))
    assert "FROM registry.example.com/slipway@sha256:1 AS extended\n" in text
    assert "org.opencontainers.image.revision" not in text
    assert 'dev.slipway.base.provider="registry"' in text


def test_another_file_in_a_folder_is_another_image(source: Callable[..., PackageSource], home: Path) -> None:
    def tags() -> tuple[str, ...]:
        now = source()
        return image_tags(now.matrix, now.variant, LOCK, lock_extension(now))

    first = tags()
    assert first[:2] == ("slipway:cpu-extended", "slipway:cpu-small-extended")
    assert tags() == first
    (home / "mine" / "code.py").write_text("VALUE = 2\n")
    assert tags()[2] != first[2]


# ---- on a base that is not the locked one ----


CHANGED = (PackageChange("libc6", "2.36-9", "2.36-10"), PackageChange("tini", "0.19.0-1", ""))


def test_an_image_says_both_that_its_base_changed_and_that_it_is_extended(
    source: Callable[..., PackageSource], tmp_path: Path
) -> None:
    now = source(replace(LOCK, changes=CHANGED))
    text = staged(now, tmp_path, Parent(OWN_STAGE, "bootstrap"))
    manifest = json.loads((tmp_path / "extension" / "image.json").read_text())
    assert manifest["base"]["changes"] == [asdict(change) for change in CHANGED]
    assert f'dev.slipway.extension="{manifest["extension"]["digest"]}"' in text
    assert 'dev.slipway.base.changes="libc6 2.36-9 -> 2.36-10; tini 0.19.0-1 -> none"' in text
    tags = image_tags(now.matrix, now.variant, now.lock, lock_extension(now))
    assert tags == ("slipway:cpu-extended", "slipway:cpu-small-extended"), "no tag of the locks"


def test_an_extended_image_tells_how_the_base_of_its_parent_differs(source: Callable[..., PackageSource]) -> None:
    now = source()
    manifest = image_manifest(now.matrix, now.variant.stock, "registry", replace(LOCK, changes=CHANGED))
    labels = image_labels(now.matrix, now.variant.stock, manifest)
    assert find_parent("slipway:cpu", now.matrix, now.variant, LOCK, MockedEngine(labels)) == Parent(
        "slipway:cpu", "registry", CHANGED
    )
    malformed = labels | {"dev.slipway.base.changes": "libc6"}
    with pytest.raises(ExtensionError, match=r"the label dev.slipway.base.changes is malformed"):
        find_parent("slipway:cpu", now.matrix, now.variant, LOCK, MockedEngine(malformed))


def test_locked_refuses_a_parent_with_another_base(
    source: Callable[..., PackageSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now, parent = source(), Parent("slipway:cpu", "registry", CHANGED)
    building = prepared(now.matrix, now.variant, MockedEngine({}), LOCK, BuildOptions(only_locked=True, parent=parent))
    with pytest.raises(LockError, match=r"the base of slipway:cpu is not the locked one: libc6"), building:
        pass


class MockedEngine(Docker):
    """Has one image, with these labels."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels

    def find(self, image: str) -> LocalImage:
        return LocalImage(image, 1, self.labels)


def test_a_plan_shows_the_layer(source: Callable[..., PackageSource], tmp_path: Path) -> None:
    now = source()
    lock_extension(now)
    for package in ("entrypoints", "trainer", "images/aliases"):
        (now.matrix.root / package).mkdir(exist_ok=True)
    plan = make_plan(now.matrix, now.variant, LOCK, tmp_path, read_extension_lock(now.matrix, now.variant, LOCK))
    assert plan.layers[-1].name == "extension"
    assert plan.layers[-1].bytes > 1000, "the packages' 1000 bytes, the wheel, and the folder"
