"""Warm caches in a real registry: tagged by their key, referrers of their image, and back without a changed byte."""

from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.errors import RegistryError, TrustError, WarmCacheError
from buildkit.registry.client import Registry
from buildkit.registry.signature import Signer, Trust
from buildkit.warming.archive import pack, unpack
from buildkit.warming.artifact import ARTIFACT, pull, push
from tests.buildkit.warming.conftest import COMPILED, EMPTY, write_files
from tests.publish.conftest import Server, connect, push_image

TAG = EMPTY.name


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "cache.tar.zst"
    pack(write_files(tmp_path / "left", COMPILED), EMPTY, path)
    return path


def test_a_pushed_cache_comes_back_under_the_tag_of_its_key(registry: Registry, archive: Path, tmp_path: Path) -> None:
    pushed = push(registry, archive)
    manifest = registry.manifest("warm-cuda-aaaaaaaaaaaa-nvidia-h200-580.65.06")
    assert manifest
    assert str(pushed) == f"{registry.reference.name}@{manifest.descriptor.digest}"
    pulled = pull(registry, TAG, tmp_path / "pulled")
    assert pulled.read_bytes() == archive.read_bytes()
    assert unpack(pulled, tmp_path / "unpacked").key == EMPTY.key
    assert pull(registry, TAG, tmp_path / "pulled") == pulled, "a cache that is here is not fetched again"


def test_pushing_it_twice_changes_nothing(registry: Registry, archive: Path) -> None:
    push(registry, archive)
    first = registry.manifest(TAG)
    push(registry, archive)
    assert registry.manifest(TAG) == first


def test_a_cache_refers_to_the_image_that_the_name_tells(shared_server: Server, archive: Path) -> None:
    repository = connect(shared_server, "test/refers")
    image = push_image(repository, "cuda")
    repository.reference = replace(repository.reference, tag="cuda")
    push(repository, archive)
    (referrer,) = repository.referrers(image)
    assert referrer.artifact_type == ARTIFACT
    assert referrer.annotations["dev.slipway.devices"] == "NVIDIA H200"
    manifest = repository.manifest(TAG)
    assert manifest
    assert manifest.descriptor.digest == referrer.digest


def test_a_cache_of_an_absent_image_is_not_pushed(shared_server: Server, archive: Path) -> None:
    repository = connect(shared_server, "test/absent")
    repository.reference = replace(repository.reference, tag="gone")
    with pytest.raises(WarmCacheError, match=r"there is no image .*/test/absent:gone"):
        push(repository, archive)
    assert not shared_server.tags("test/absent")


@pytest.mark.usefixtures("login")
def test_a_signed_cache_is_taken_by_its_tag(
    shared_server: Server, archive: Path, signer: Signer, trust: Trust, tmp_path: Path
) -> None:
    repository = connect(shared_server, "test/signed")
    push(repository, archive, signer, shared_server.ca)
    pulled = pull(repository, TAG, tmp_path, trust, shared_server.ca)
    assert pulled.read_bytes() == archive.read_bytes()


@pytest.mark.usefixtures("login")
def test_a_tag_that_somebody_moved_to_another_cache_is_not_taken(
    shared_server: Server, archive: Path, signer: Signer, trust: Trust, tmp_path: Path
) -> None:
    repository = connect(shared_server, "test/moved")
    push(repository, archive, signer, shared_server.ca)
    other = tmp_path / "other.tar.zst"
    pack(write_files(tmp_path / "hostile", {**COMPILED, "triton/x/hostile.so": b"code"}), EMPTY, other)
    push(repository, other)  # the same key, so the same tag
    with pytest.raises(TrustError, match="no signature by the key"):
        pull(repository, TAG, tmp_path / "pulled", trust, shared_server.ca)
    assert not (tmp_path / "pulled").exists()


def test_an_image_is_no_warm_cache(registry: Registry, tmp_path: Path) -> None:
    push_image(registry, "latest")
    with pytest.raises(WarmCacheError, match="latest is no warm cache"):
        pull(registry, "latest", tmp_path)
    with pytest.raises(WarmCacheError, match=r"there is no warm cache .*, gone"):
        pull(registry, "gone", tmp_path)


def test_a_cache_that_the_registry_damaged_is_not_kept(own_server: Server, archive: Path, tmp_path: Path) -> None:
    repository = connect(own_server, "warm", patience=1)
    push(repository, archive)
    manifest = repository.manifest(TAG)
    assert manifest
    own_server.blob_path(manifest.layers[0].digest).write_bytes(b"x" * archive.stat().st_size)
    with pytest.raises(RegistryError, match="tampered with or damaged"):
        pull(repository, TAG, tmp_path / "pulled")
    assert not list((tmp_path / "pulled").iterdir())
