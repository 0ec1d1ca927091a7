"""`publish_images` from build to promotion. Registry and cosign are real; engine, build and smoke tests are mocked.

The mocked build makes no image; the mocked engine saves a small one.
"""

import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from buildkit.errors import BuildError, BuildkitError, PublishError, RegistryError
from buildkit.images.archive import ImageArchive, read_member
from buildkit.images.build import BuildOptions, BuildResult
from buildkit.publishing.check import check_published
from buildkit.publishing.publish import ReleaseRequest, publish_images, push_staged
from buildkit.publishing.release import Tags
from buildkit.recipe.lock import PackageChange
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import load_matrix
from buildkit.recipe.project import UNCOMMITTED
from buildkit.registry.client import Registry
from buildkit.registry.compression import COMPRESSIONS
from buildkit.registry.signature import Signer, Trust
from buildkit.running.engine import Docker
from buildkit.supply.base import drift
from tests.buildkit.images.test_archive import add, saved
from tests.publish.conftest import (
    LABELS,
    REVISION,
    ROOT,
    Server,
    base_layers,
    connect,
    image_json,
    make_layer,
    push_image,
)

IMAGE_ID = "sha256:" + "c" * 64
REPOSITORY = "slipway"


class MockedEngine(Docker):
    """Writes its commands into a file and saves `image`; `failing` names a command that fails."""

    name = "docker"

    def __init__(self, folder: Path, image: Path, failing: str = "") -> None:
        self.binary, self.log = str(folder / "engine"), folder / "commands"
        script = (
            "#!/bin/sh",
            f'for last; do :; done; echo "$1 $last" >>{self.log}',
            f'[ "$1" != "{failing}" ] || exit 1',
            f'[ "$1" != save ] || cp {image} "$3"',
        )
        Path(self.binary).write_text("\n".join(script))
        Path(self.binary).chmod(0o755)

    @property
    def commands(self) -> list[str]:
        return self.log.read_text().splitlines()


@dataclass
class Publisher:
    """`tested` are the images that the smoke tests saw; `tags_then` the registry's tags at that time."""

    request: ReleaseRequest
    server: Server
    statuses: list[int] = field(default_factory=lambda: [0, 0])
    tested: list[str] = field(default_factory=list)
    tags_then: list[set[str]] = field(default_factory=list)

    @property
    def registry(self) -> Registry:
        return connect(self.server, REPOSITORY)

    def save_image(self, path: Path) -> Path:
        lock = f"sha256:{read_lock(self.request.matrix, self.request.variant).digest}"
        variant = self.request.variant.name
        files = [*base_layers(), {"etc/slipway/image.json": json.dumps({**image_json(lock), "variant": variant})}]
        labels = {**LABELS, "dev.slipway.lock": lock, "dev.slipway.variant": variant}
        return saved(path, *map(make_layer, files), config={"Labels": labels})

    def run_smoke_tests(self, _root: Path, _target: str, image: str, *_: object, **__: object) -> int:
        self.tested.append(image)
        self.tags_then.append(self.server.tags(REPOSITORY))
        return self.statuses[len(self.tested) - 1]


@pytest.fixture
def publisher(own_server: Server, own_login: None, signer: Signer, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    matrix = load_matrix(ROOT)
    reference = connect(own_server, REPOSITORY).reference
    request = ReleaseRequest(matrix, matrix.variant("cpu"), reference, signer, own_server.ca)
    publisher = Publisher(request, own_server)

    def build(*_: object, **__: object) -> BuildResult:
        return BuildResult("cpu", request.variant.name, (), IMAGE_ID, 1, 1.0, "bootstrap")

    monkeypatch.setattr("buildkit.publishing.publish.build_image", build)
    monkeypatch.setattr("buildkit.publishing.publish.is_committed", lambda *_: True)
    monkeypatch.setattr("buildkit.publishing.publish.source_revision", lambda _root: REVISION)
    monkeypatch.setattr("buildkit.publishing.publish.run_container_tests", publisher.run_smoke_tests)
    return publisher


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_mocked_engine_publishes_an_image_that_strangers_can_verify_with_each_compression(
    publisher: Publisher, tmp_path: Path, trust: Trust, compression: str
) -> None:
    publisher.request = replace(publisher.request, compression=compression)
    (publication,) = publish_images(
        [publisher.request], MockedEngine(tmp_path, publisher.save_image(tmp_path / "image.tar"))
    )
    report = check_published(publisher.registry, publication.digest, trust, publisher.server.ca)
    assert report.passed, report.checks


def test_mocked_engine_a_lock_that_is_not_committed_is_not_published(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buildkit.publishing.publish.is_committed", lambda *_: False)
    with pytest.raises(PublishError, match=r"images/locks/cpu/.*\.txt is not committed"):
        publish_images([publisher.request], MockedEngine(tmp_path, publisher.save_image(tmp_path / "image.tar")))
    assert publisher.tested == []


def test_mocked_engine_an_image_with_another_base_than_the_locked_one_is_not_published(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(_matrix: object, _variant: object, _engine: object, options: BuildOptions) -> BuildResult:
        assert options.only_locked
        raise drift(publisher.request.variant, (PackageChange("tini", "1", "2"),))

    monkeypatch.setattr("buildkit.publishing.publish.build_image", build)
    with pytest.raises(PublishError, match=r"would not be the one of its lock: .*tini 1 -> 2") as caught:
        publish_images([publisher.request], MockedEngine(tmp_path, publisher.save_image(tmp_path / "image.tar")))
    assert "buildkit lock --upgrade-base --target cpu" in caught.value.hint
    assert "commit the lock" in caught.value.hint


def test_mocked_engine_pulls_the_digest_back_and_it_is_tested_before_any_promotion(
    publisher: Publisher, tmp_path: Path
) -> None:
    engine = MockedEngine(tmp_path, publisher.save_image(tmp_path / "image.tar"))
    (publication,) = publish_images([publisher.request], engine)
    pulled = publisher.request.repository.at(publication.digest)
    assert engine.commands == [f"save {IMAGE_ID}", f"pull {pulled}", f"rmi {pulled}"]
    assert publisher.tested == [IMAGE_ID, str(pulled)]
    assert publisher.tags_then[-1].isdisjoint(publication.tags)
    assert publisher.server.tags(REPOSITORY) >= set(publication.tags)


def test_mocked_engine_publishes_one_digest_on_machines_with_other_clocks(publisher: Publisher, tmp_path: Path) -> None:
    digests = set()
    for hour in ("10", "11"):
        image = publisher.save_image(tmp_path / "image.tar")
        with tarfile.open(image, "a") as archive:  # as a second build of the same commit writes it
            config = json.loads(read_member(image, "config"))
            add(archive, "config", json.dumps({**config, "created": f"2026-11-23T{hour}:00:00Z"}).encode())
        publisher.tested.clear()
        digests.add(publish_images([publisher.request], MockedEngine(tmp_path, image))[0].digest)
    assert len(digests) == 1


def swap_the_staged_image(publisher: Publisher, patch: pytest.MonkeyPatch) -> None:
    """Somebody moves the staging tag to an image with the same labels, and so the same lock and commit."""

    def push(registry: Registry, archive: ImageArchive, tags: Tags) -> None:
        push_staged(registry, archive, tags)
        labels = json.loads(archive.config)["config"]["Labels"]
        push_image(registry, tags.staging, [*base_layers(), {"opt/slipway/app/evil.py": "import os"}], labels)

    patch.setattr("buildkit.publishing.publish.push_staged", push)


def damage_a_layer(publisher: Publisher, patch: pytest.MonkeyPatch) -> None:
    def push(registry: Registry, archive: ImageArchive, tags: Tags) -> None:
        push_staged(registry, archive, tags)
        path = publisher.server.blob_path(archive.layers[0].blob.digest)
        path.write_bytes(bytes(len(path.read_bytes())))

    patch.setattr("buildkit.publishing.publish.push_staged", push)


def fail_the_second_test(publisher: Publisher, patch: pytest.MonkeyPatch) -> None:
    publisher.statuses[1] = 1


def change_the_checkout(publisher: Publisher, patch: pytest.MonkeyPatch) -> None:
    revisions = iter(["a" * 40, "a" * 40 + UNCOMMITTED])
    patch.setattr("buildkit.publishing.publish.source_revision", lambda _root: next(revisions))


def dirty_the_checkout(publisher: Publisher, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("buildkit.publishing.publish.source_revision", lambda _root: "a" * 40 + UNCOMMITTED)
    patch.setattr("buildkit.publishing.publish.uncommitted", lambda _root: ["trainer/a.py", "b", "c", "d"])


def change_nothing(publisher: Publisher, patch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "failing", "error", "message"),
    [
        (dirty_the_checkout, "", PublishError, r"trainer/a\.py, b, c and 1 more is not as in the commit aaaaaaaaaaaa,"),
        (change_the_checkout, "", PublishError, "changed while the image was built"),
        (swap_the_staged_image, "", PublishError, "names another image, .* than the one that was built"),
        (damage_a_layer, "", RegistryError, "tampered with or damaged"),
        (change_nothing, "save", BuildError, "could not save"),
        (change_nothing, "pull", PublishError, "the engine could not pull"),
        (fail_the_second_test, "", PublishError, "the smoke tests of .*@sha256:.* ended with status 1"),
    ],
)
def test_mocked_engine_publishes_only_what_was_read_back_whole(
    publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Publisher, pytest.MonkeyPatch], None],
    failing: str,
    error: type[BuildkitError],
    message: str,
) -> None:
    prepare(publisher, monkeypatch)
    engine = MockedEngine(tmp_path, publisher.save_image(tmp_path / "image.tar"), failing)
    with pytest.raises(error, match=message):
        publish_images([publisher.request], engine)
    assert all(tag.startswith("staging-") for tag in publisher.server.tags(REPOSITORY))


def test_mocked_engine_a_release_of_two_images_promotes_neither_when_the_second_fails(
    publisher: Publisher, tmp_path: Path
) -> None:
    requests = [publisher.request, replace(publisher.request, compression="gzip")]
    engine = MockedEngine(tmp_path, publisher.save_image(tmp_path / "image.tar"))
    publisher.statuses = [0, 0, 0, 1]
    with pytest.raises(PublishError, match="the smoke tests of"):
        publish_images(requests, engine)
    assert len(publisher.tested) == 4
    assert all(tag.startswith(("staging-", "sha256-")) for tag in publisher.server.tags(REPOSITORY))
    publisher.tested.clear()
    publisher.statuses[3] = 0
    publications = publish_images(requests, engine)
    assert {tag for each in publications for tag in each.tags} <= publisher.server.tags(REPOSITORY)


def test_mocked_engine_what_is_not_committed_stops_a_release_before_the_first_build(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = publisher.request.matrix.variant("rocm", "rocm-debian")
    monkeypatch.setattr("buildkit.publishing.publish.is_committed", lambda _root, path: path.parent.name != "rocm")
    engine = MockedEngine(tmp_path, publisher.save_image(tmp_path / "image.tar"))
    with pytest.raises(PublishError, match=r"images/locks/rocm/rocm-debian\.txt is not committed"):
        publish_images([publisher.request, replace(publisher.request, variant=other)], engine)
    assert publisher.tested == []


def test_mocked_engine_a_release_is_of_one_commit(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody commits while the first image is tested."""
    commits = iter([REVISION, REVISION, REVISION, "c" * 40])
    monkeypatch.setattr("buildkit.publishing.publish.source_revision", lambda _root: next(commits))
    engine = MockedEngine(tmp_path, publisher.save_image(tmp_path / "image.tar"))
    with pytest.raises(PublishError, match="changed while the image was built"):
        publish_images([publisher.request, publisher.request], engine)
    assert all(tag.startswith(("staging-", "sha256-")) for tag in publisher.server.tags(REPOSITORY))
