"""The registry client against Debian's docker-registry: authentication, certificates, content, referrers, failures."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from buildkit.errors import RegistryError
from buildkit.recipe.matrix import Base
from buildkit.registry.client import Registry
from buildkit.registry.content import IMAGE, Descriptor, descriptors, digest_of, read_object
from buildkit.registry.credentials import Credentials, read_credentials
from buildkit.registry.reference import parse_reference
from buildkit.supply.base import registry_digest
from tests.publish.conftest import PASSWORD, USER, Server, connect, docker_config, make_server, push_image


def test_pushed_blob_comes_back(registry: Registry) -> None:
    blob = registry.put_blob(b"content", "text/plain")
    assert registry.has_blob(blob)
    assert registry.blob(blob) == b"content"
    assert registry.put_blob(b"content", "text/plain") == blob


def test_missing_manifest_is_none(registry: Registry) -> None:
    registry.put_blob(b"content", "text/plain")
    assert registry.manifest("absent") is None


def test_manifest_keeps_its_bytes(registry: Registry) -> None:
    digest = push_image(registry, "latest")
    manifest = registry.manifest("latest")
    assert manifest
    assert digest == digest_of(manifest.body)
    assert registry.manifest(digest) == manifest


def test_base_is_locked_by_its_digest_in_the_registry(
    registry: Registry, shared_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = push_image(registry, "slim")
    monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(tmp_path, shared_server.host)))
    monkeypatch.setenv("UV_SSL_CERT_FILE", str(shared_server.ca))
    base = Base("debian", f"{registry.reference.name}:slim", "3.11", "2.36")
    assert registry_digest(base) == digest
    with pytest.raises(RegistryError, match=r"has no .*:gone"):
        registry_digest(replace(base, image=f"{registry.reference.name}:gone"))


def test_wrong_password_is_named(shared_server: Server) -> None:
    registry = connect(shared_server, "test/password", password="wrong")
    with pytest.raises(RegistryError, match=r"refuses POST .*HTTP 401") as error:
        registry.check_access()
    assert f"docker login {shared_server.host}" in error.value.hint


def test_no_password_is_named(shared_server: Server) -> None:
    reference = connect(shared_server, "test/anonymous").reference
    with pytest.raises(RegistryError, match="requires a password"):
        Registry(reference, Credentials(), shared_server.ca).check_access()


def test_password_is_never_shown() -> None:
    assert PASSWORD not in repr(Credentials(USER, PASSWORD))


def test_credentials_are_those_of_docker_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(tmp_path, "registry.example.com:5000")))
    assert read_credentials("registry.example.com:5000") == Credentials(USER, PASSWORD)
    assert read_credentials("elsewhere.example.com") == Credentials()


def test_docker_hub_is_asked_at_its_own_host_with_its_own_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker login` stores Docker Hub's password under an address that is neither its images' host nor its API's."""
    monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(tmp_path, "https://index.docker.io/v1/")))
    reference = parse_reference("docker.io/team/slipway:cpu")
    assert str(reference) == "docker.io/team/slipway:cpu"
    assert reference.api_host == "registry-1.docker.io"
    assert read_credentials(reference.host) == Credentials(USER, PASSWORD)


def test_credential_helper_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "docker-credential-test"
    helper.write_text('#!/bin/sh\necho \'{"ServerURL":"r","Username":"<token>","Secret":"refresh"}\'\n')
    helper.chmod(0o755)
    (tmp_path / "config.json").write_text('{"credHelpers": {"registry.example.com": "test"}}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert read_credentials("registry.example.com") == Credentials(identity_token="refresh")


def test_unknown_authority_is_named(shared_server: Server, tmp_path: Path) -> None:
    reference = connect(shared_server, "test/certificate").reference
    with pytest.raises(RegistryError, match="no certificate that this host trusts") as error:
        Registry(reference, Credentials(USER, PASSWORD), None, patience=1).check_access()
    assert "--registry-ca" in error.value.hint


def test_named_authority_is_added_to_the_systems(
    shared_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of them, a private registry's authority would refuse a public token server."""
    private = tmp_path / "private.pem"
    trustme.CA().cert_pem.write_to_path(str(private))
    monkeypatch.setattr("buildkit.host.certificates.SYSTEM_CA", (shared_server.ca,))
    reference = connect(shared_server, "test/authorities").reference
    Registry(reference, Credentials(USER, PASSWORD), private, patience=1).check_access()


def test_unreachable_registry_is_named(shared_server: Server) -> None:
    reference = replace(connect(shared_server, "test/absent").reference, host="127.0.0.1:1")
    with pytest.raises(RegistryError, match=r"127\.0\.0\.1:1 did not answer POST .*Connection refused"):
        Registry(reference, Credentials(), None, patience=0.5).check_access()


def test_request_is_repeated_until_the_registry_is_back(own_server: Server) -> None:
    registry = connect(own_server, "test/restart", patience=20)
    own_server.kill()
    threading.Timer(0.5, own_server.start).start()
    blob = registry.put_blob(b"content", "text/plain")
    assert registry.blob(blob) == b"content"


def test_registry_killed_while_it_receives(own_server: Server) -> None:
    content = os.urandom(2**25)

    def kill_at_first_bytes() -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if own_server.stored_bytes() > 0:
                own_server.kill()
                return
            time.sleep(0.001)

    killer = threading.Thread(target=kill_at_first_bytes)
    killer.start()
    with pytest.raises(RegistryError, match="did not answer PUT") as error:
        connect(own_server, "test/killed", patience=0.5).put_blob(content, "application/octet-stream")
    killer.join()
    assert "run the same command again" in error.value.hint
    own_server.start()
    registry = connect(own_server, "test/killed")
    blob = Descriptor("application/octet-stream", digest_of(content), len(content))
    assert not registry.has_blob(blob)
    assert registry.put_blob(content, "application/octet-stream") == blob
    assert registry.blob(blob) == content


def test_full_disk_is_named_at_once(tmp_path: Path, authority) -> None:
    """On a tmpfs of one megabyte, in a mount namespace that ends with the registry.

    The client would be patient for longer than a test may take.
    """
    become_root = () if os.geteuid() == 0 else ("--map-root-user",)
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    # In a chroot `/` is no mount point, and its propagation cannot be changed.
    propagation = () if any(line.split()[4] == "/" for line in mounts) else ("--propagation", "unchanged")
    mount = f'mount -t tmpfs -o size=1m none "{tmp_path}/storage" && exec "$@"'
    wrapper = ("unshare", *become_root, *propagation, "--mount", "sh", "-c", mount, "_")
    server = make_server(tmp_path, authority, wrapper=wrapper)
    server.start()
    try:
        with pytest.raises(RegistryError, match="has no space left") as error:
            connect(server, "test/full", patience=600).put_blob(os.urandom(2**21), "application/octet-stream")
        assert "free space" in error.value.hint
    finally:
        server.kill()


def test_blob_changed_in_the_storage_is_refused(own_server: Server) -> None:
    registry = connect(own_server, "test/tampered")
    blob = registry.put_blob(b"content", "text/plain")
    own_server.blob_path(blob.digest).write_bytes(b"CONTENT")
    with pytest.raises(RegistryError, match="tampered with or damaged"):
        registry.blob(blob)


def test_blob_larger_than_the_limit_is_refused_unread(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildkit.registry.client.LIMIT", 7)
    assert registry.blob(registry.put_blob(b"content", "text/plain")) == b"content"
    larger = registry.put_blob(b"content!", "text/plain")
    monkeypatch.setattr(registry, "open_blob", pytest.fail)
    with pytest.raises(RegistryError, match=r"has 8 bytes, more than"):
        registry.blob(larger)


def test_manifest_larger_than_the_limit_is_refused(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    push_image(registry, "latest")
    monkeypatch.setattr("buildkit.registry.client.ANSWER_LIMIT", 100)
    with pytest.raises(RegistryError, match="more than 100 bytes"):
        registry.manifest("latest")


def test_blob_larger_than_its_descriptor_is_refused_before_its_end(registry: Registry) -> None:
    blob = registry.put_blob(os.urandom(2**23), "application/octet-stream")
    stream = registry.open_blob(replace(blob, size=2**20))
    with pytest.raises(RegistryError, match="more than the 1048576 bytes"):
        stream.read()
    stream.close()


def test_frozen_registry_times_out(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildkit.registry.transport.TIMEOUT", (0.5, 0.5))
    registry = connect(own_server, "test/frozen", patience=1)
    own_server.signal(signal.SIGSTOP)
    with pytest.raises(RegistryError, match="did not answer"):
        registry.manifest("latest")


def test_attachments_are_found_through_the_fallback_tag(registry: Registry) -> None:
    digest = push_image(registry, "latest")
    image = registry.manifest("latest")
    assert image
    first = registry.attach(image.descriptor, "text/vnd.test.first", b"one", {"a": "b"})
    second = registry.attach(image.descriptor, "text/vnd.test.second", b"two", {})
    again = registry.attach(image.descriptor, "text/vnd.test.first", b"one", {"a": "b"})
    assert again == first
    assert registry.referrers(digest) == [first, second]
    manifest = registry.manifest(first.digest)
    assert manifest
    assert manifest.content["subject"] == image.descriptor.as_json()
    assert manifest.descriptor.media_type == IMAGE
    assert registry.blob(manifest.layers[0]) == b"one"


def test_fresh_image_has_no_referrers(registry: Registry) -> None:
    assert registry.referrers(push_image(registry, "latest")) == []


DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    "value",
    [
        {},
        None,
        "text",
        {"size": 1},
        {"mediaType": "a", "digest": DIGEST, "size": "1"},
        {"mediaType": "a", "digest": DIGEST, "size": float("inf")},
        {"mediaType": "a", "digest": DIGEST, "size": -1},
        {"mediaType": "a", "digest": "../../secret", "size": 1},
        {"mediaType": "a", "digest": DIGEST, "size": 1, "annotations": ["a"]},
    ],
)
def test_a_value_that_is_not_a_descriptor_is_refused(value: Any) -> None:
    with pytest.raises(RegistryError, match="no valid OCI descriptor"):
        Descriptor.read(value)


@pytest.mark.parametrize("manifests", [None, [], "absent"])
def test_list_without_descriptors_is_empty(manifests: Any) -> None:
    assert descriptors({"manifests": manifests} if manifests != "absent" else {}, "manifests") == []


@pytest.mark.parametrize("manifests", [{"a": 1}, 7, "text"])
def test_manifests_that_are_no_list_are_refused(manifests: Any) -> None:
    with pytest.raises(RegistryError, match="manifests that are no list"):
        descriptors({"manifests": manifests}, "manifests")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RegistryError, match="sent no JSON"):
        read_object(body)
