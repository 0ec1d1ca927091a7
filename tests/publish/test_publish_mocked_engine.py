"""`publish_image` from build to promotion. Registry and cosign are real; engine, build and smoke tests are mocked.

The mocked build makes no image: each test puts one under the staging tag, as the engine's push would.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from buildkit.errors import BuildkitError, PublishError, RegistryError
from buildkit.images.build import BuildResult
from buildkit.publishing.check import find_image
from buildkit.publishing.publish import ReleaseRequest, publish_image, tags_for
from buildkit.publishing.release import Tags
from buildkit.publishing.signature import Signer
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import load_matrix
from buildkit.recipe.project import source_revision
from buildkit.registry.client import Registry
from buildkit.running.engine import Docker
from tests.publish.conftest import LABELS, ROOT, Server, base_layers, connect, image_json, push_image

IMAGE_ID = "sha256:" + "c" * 64
REPOSITORY = "slipway"


class MockedEngine(Docker):
    """Writes its commands into a file; `failing` names one that fails."""

    def __init__(self, folder: Path, failing: str = "") -> None:
        self.binary, self.log = str(folder / "engine"), folder / "commands"
        script = f'#!/bin/sh\necho "$@" >>{self.log}\n[ "$1" != "{failing}" ]\n'
        Path(self.binary).write_text(script)
        Path(self.binary).chmod(0o755)

    @property
    def commands(self) -> list[str]:
        return self.log.read_text().splitlines()


@dataclass
class Publisher:
    """`tested` are the images that the smoke tests saw; `tags_then` the registry's tags at that time."""

    request: ReleaseRequest
    server: Server
    tags: Tags
    digest: str = ""
    built: str = IMAGE_ID
    statuses: list[int] = field(default_factory=lambda: [0, 0])
    tested: list[str] = field(default_factory=list)
    tags_then: list[set[str]] = field(default_factory=list)

    @property
    def registry(self) -> Registry:
        return connect(self.server, REPOSITORY)

    def stage(self, lock: str = "") -> None:
        lock = lock or f"sha256:{read_lock(self.request.matrix, self.request.variant).digest}"
        labels = {
            **LABELS,
            "dev.slipway.lock": lock,
            "org.opencontainers.image.revision": source_revision(ROOT),
        }
        layers = [*base_layers(), {"etc/slipway/image.json": json.dumps(image_json(lock))}]
        self.digest = push_image(self.registry, "pushed", layers, labels)
        manifest = find_image(self.registry, self.digest).manifest
        self.built = manifest.config.digest
        self.tags = tags_for(self.request, self.built)
        self.registry.put_manifest(self.tags.staging, manifest.body, manifest.descriptor.media_type)

    def run_smoke_tests(self, _root: Path, _target: str, image: str, *_: object, **__: object) -> int:
        self.tested.append(image)
        self.tags_then.append(self.server.tags(REPOSITORY))
        return self.statuses[len(self.tested) - 1]


@pytest.fixture
def publisher(own_server: Server, own_login: None, signer: Signer, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    matrix = load_matrix(ROOT)
    reference = connect(own_server, REPOSITORY).reference
    request = ReleaseRequest(matrix, matrix.variant("cpu"), reference, signer, own_server.ca)
    publisher = Publisher(request, own_server, tags_for(request, IMAGE_ID))

    def build(*_: object) -> BuildResult:
        return BuildResult("cpu", request.variant.name, (), publisher.built, 1, 1.0, "bootstrap")

    monkeypatch.setattr("buildkit.publishing.publish.build_image", build)
    monkeypatch.setattr("buildkit.publishing.publish.run_container_tests", publisher.run_smoke_tests)
    return publisher


def test_mocked_engine_pulls_the_digest_back_and_it_is_tested_before_any_promotion(
    publisher: Publisher, tmp_path: Path
) -> None:
    engine = MockedEngine(tmp_path)
    publisher.stage()
    publication = publish_image(publisher.request, engine)
    staged = publisher.request.repository.tagged(publisher.tags.staging)
    pulled = publisher.request.repository.at(publisher.digest)
    assert publication.digest == publisher.digest
    assert engine.commands == [
        f"tag {publisher.built} {staged}",
        f"push {staged}",
        f"rmi --no-prune {staged}",
        f"pull {pulled}",
        f"rmi --no-prune {pulled}",
    ]
    assert publisher.tested == [publisher.built, str(pulled)]
    assert publisher.tags_then[-1].isdisjoint(publisher.tags.promoted)
    assert publisher.server.tags(REPOSITORY) >= set(publisher.tags.promoted)


def swap_the_staged_image(publisher: Publisher) -> None:
    """Somebody pushes an image with the same labels, and so the same lock and commit, to the staging tag."""
    publisher.stage()
    evil = {"opt/slipway/app/evil.py": "import os"}
    labels = dict(find_image(publisher.registry, publisher.digest).labels)
    push_image(publisher.registry, publisher.tags.staging, [*base_layers(), evil], labels)


def damage_a_layer(publisher: Publisher) -> None:
    publisher.stage()
    manifest = publisher.registry.manifest(publisher.tags.staging)
    assert manifest
    path = publisher.server.blob_path(manifest.layers[0].digest)
    path.write_bytes(bytes(len(path.read_bytes())))


def fail_the_second_test(publisher: Publisher) -> None:
    publisher.stage()
    publisher.statuses[1] = 1


@pytest.mark.parametrize(
    ("prepare", "failing", "error", "message"),
    [
        (swap_the_staged_image, "", PublishError, "names another image, .* than the one that was built"),
        (damage_a_layer, "", RegistryError, "tampered with or damaged"),
        (Publisher.stage, "push", PublishError, "the engine could not push"),
        (Publisher.stage, "pull", PublishError, "the engine could not pull"),
        (fail_the_second_test, "", PublishError, "the smoke tests of .*@sha256:.* ended with status 1"),
    ],
)
def test_mocked_engine_publishes_only_what_was_read_back_whole(
    publisher: Publisher,
    tmp_path: Path,
    prepare: Callable[[Publisher], None],
    failing: str,
    error: type[BuildkitError],
    message: str,
) -> None:
    prepare(publisher)
    with pytest.raises(error, match=message):
        publish_image(publisher.request, MockedEngine(tmp_path, failing))
    assert publisher.server.tags(REPOSITORY) == {"pushed", publisher.tags.staging}
