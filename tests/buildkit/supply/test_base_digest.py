"""A lock pins the base's image by its digest in the registry, as soon as the registry answers."""

import http.server
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.host.settings import read_host
from buildkit.recipe.dockerfile import render_dockerfile
from buildkit.recipe.lock import Deb
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import Matrix, Variant, load_matrix
from buildkit.registry.content import IMAGE, INDEX, digest_of
from buildkit.supply.base import Bootstrapped
from buildkit.supply.resolve import write_lock
from tests.serving import serving


class BaseRegistry(http.server.ThreadingHTTPServer):
    """Serves one tag on loopback: an index of images for two platforms. Out of service, it answers 503."""

    in_service = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.image = f"127.0.0.1:{self.server_port}/debian:bookworm-slim"
        self.publish("first")

    def publish(self, version: str) -> str:
        """The digest that the tag points at from now on."""
        images = [
            {
                "mediaType": IMAGE,
                "digest": digest_of(f"{version} {architecture}".encode()),
                "size": 1,
                "platform": {"os": "linux", "architecture": architecture},
            }
            for architecture in ("amd64", "arm64")
        ]
        self.index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": images}).encode()
        return digest_of(self.index)


class Handler(http.server.BaseHTTPRequestHandler):
    server: BaseRegistry

    def do_GET(self) -> None:
        present = self.server.in_service and self.path == "/v2/debian/manifests/bookworm-slim"
        self.send_response(200 if present else 503)
        self.send_header("Content-Type", INDEX)
        self.send_header("Content-Length", str(len(self.server.index) if present else 0))
        self.end_headers()
        if present:
            self.wfile.write(self.server.index)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[BaseRegistry]:
    with serving(BaseRegistry()) as server:
        yield server


@pytest.fixture(autouse=True)
def host_without_mmdebstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bootstrapping is replaced by a fixed list of packages."""
    monkeypatch.setattr("buildkit.supply.base.PATIENCE", 0.1)
    monkeypatch.setattr("buildkit.supply.resolve.bootstrap_refusal", lambda _: "")
    monkeypatch.setattr("buildkit.supply.resolve.resolve_base", lambda *_: Made(Path(), (Deb("tini", "1", "2" * 64),)))


class Made(Bootstrapped):
    bytes = 1


def on(registry: BaseRegistry, project: Path) -> tuple[Matrix, Variant]:
    path = project / "images" / "matrix.toml"
    path.write_text(path.read_text().replace("debian:bookworm-slim", registry.image))
    matrix = load_matrix(project)
    return matrix, matrix.variant("cpu")


@pytest.mark.parametrize("suffix", ["", "-arm64"])
def test_the_lock_has_the_digest_of_the_index_for_all_platforms(
    registry: BaseRegistry, project: Path, tmp_path: Path, suffix: str
) -> None:
    matrix, _ = on(registry, project)
    variant = matrix.variant("cpu", f"small{suffix}")
    write_lock(matrix, variant, read_host(), tmp_path)
    lock = read_lock(matrix, variant)
    assert lock.base_digest == digest_of(registry.index)
    text = render_dockerfile(matrix, variant, "registry", {}, lock)
    assert f"FROM {registry.image.partition('@')[0]}@{lock.base_digest} AS vendor" in text


def test_a_lock_without_a_digest_gets_it_once_the_registry_answers(
    registry: BaseRegistry, project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    matrix, variant = on(registry, project)
    registry.in_service = False
    with caplog.at_level(logging.WARNING):
        write_lock(matrix, variant, read_host(), tmp_path)
    assert "503" in caplog.text
    assert "the lock pins the Debian packages alone" in caplog.text
    unpinned = read_lock(matrix, variant)
    assert unpinned.base_reference == registry.image

    registry.in_service = True
    write_lock(matrix, variant, read_host(), tmp_path)
    lock = read_lock(matrix, variant)
    assert lock == replace(unpinned, base_digest=digest_of(registry.index))
    assert lock.debs


def test_a_new_digest_is_taken_with_upgrade_alone(registry: BaseRegistry, project: Path, tmp_path: Path) -> None:
    matrix, variant = on(registry, project)
    first = digest_of(registry.index)
    write_lock(matrix, variant, read_host(), tmp_path)
    second = registry.publish("second")
    write_lock(matrix, variant, read_host(), tmp_path)
    assert read_lock(matrix, variant).base_digest == first
    write_lock(matrix, variant, read_host(), tmp_path, upgrade=True)
    assert read_lock(matrix, variant).base_digest == second
