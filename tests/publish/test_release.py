"""A staged image becomes a promoted one, and verification finds every change. Registry, cosign and keys are real."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.errors import BuildkitError, PublishError, RegistryError, TrustError
from buildkit.publishing import dsse, provenance
from buildkit.publishing.check import PublishedImage, VerificationReport, check_provenance, check_published
from buildkit.publishing.provenance import BuildRecord
from buildkit.publishing.release import Publication, Tags, choose_tags, read_staged
from buildkit.registry.client import Registry
from buildkit.registry.content import Descriptor
from buildkit.registry.credentials import Credentials
from buildkit.registry.signature import Signer, Trust
from tests.publish.conftest import (
    LABELS,
    LOCK,
    LOCK_DIGEST,
    PASSWORD,
    USER,
    Server,
    base_layers,
    connect,
    image_json,
    push_image,
    release,
    stage,
)

ALL_CHECKS = ["manifest", "signature", "tag", "layers", "labels", "sbom cyclonedx", "sbom spdx", "provenance"]


def failures(report: VerificationReport) -> dict[str, str]:
    return {check.name: check.detail for check in report.checks if not check.passed}


def test_tags_name_target_variant_lock_and_content() -> None:
    tags = choose_tags("cpu", "small", True, "0.1.0", "sha256:" + "a" * 64, "sha256:" + "c" * 64)
    assert tags.immutable == "cpu-small-aaaaaaaaaaaa-cccccccccccc"
    assert tags.staging == "staging-" + tags.immutable
    assert tags.promoted == (tags.immutable, "cpu-small-0.1.0", "cpu-small", "cpu")
    assert "cpu" not in choose_tags("cpu", "other", False, "0.1.0", LOCK_DIGEST, LOCK_DIGEST).promoted


def test_released_image_passes_every_check(
    registry: Registry, record: BuildRecord, signer: Signer, trust: Trust, login: None, shared_server: Server
) -> None:
    image, tags = stage(registry)
    publication = release(registry, image, tags, record, LOCK, signer, shared_server.ca)
    assert publication.digest == image.digest
    for tag in tags.promoted:
        manifest = registry.manifest(tag)
        assert manifest
        assert manifest.descriptor.digest == image.digest
        report = check_published(registry, tag, trust, shared_server.ca)
        assert [check.name for check in report.checks] == ALL_CHECKS
        assert failures(report) == {}


def test_releasing_again_changes_nothing(
    registry: Registry, record: BuildRecord, signer: Signer, login: None, shared_server: Server
) -> None:
    image, tags = stage(registry)
    first = release(registry, image, tags, record, LOCK, signer, shared_server.ca)
    later = replace(record, finished="2026-11-22T00:00:00Z")
    assert release(registry, image, tags, later, LOCK, signer, shared_server.ca) == first
    assert len(registry.referrers(image.digest)) == 3


def test_immutable_tag_is_never_moved(
    registry: Registry, record: BuildRecord, signer: Signer, login: None, shared_server: Server
) -> None:
    image, tags = stage(registry)
    other = push_image(registry, tags.immutable, labels={**LABELS, "org.opencontainers.image.version": "9"})
    with pytest.raises(PublishError, match="exists with other content"):
        release(registry, image, tags, record, LOCK, signer, shared_server.ca)
    manifest = registry.manifest(tags.immutable)
    assert manifest
    assert manifest.descriptor.digest == other
    assert registry.manifest("cpu-small") is None


# ---- interruptions ---------------------------------------------------------------------------------------------------


class DoomedRegistry(Registry):
    """Kills its server as soon as that has stored a number of attachments."""

    def __init__(self, server: Server, survives: int) -> None:
        known = connect(server, "slipway")
        super().__init__(known.reference, Credentials(USER, PASSWORD), server.ca, patience=0.5)
        self.server, self.survives, self.attached = server, survives, 0

    def attach(
        self, subject: Descriptor, artifact_type: str, content: bytes, annotations: Mapping[str, str]
    ) -> Descriptor:
        artifact = super().attach(subject, artifact_type, content, annotations)
        self.attached += 1
        if self.attached == self.survives:
            self.server.kill()
        return artifact


@pytest.mark.parametrize("survives", [1, 3])
def test_registry_killed_between_staging_and_promotion(
    own_server: Server, own_login: None, record: BuildRecord, signer: Signer, trust: Trust, survives: int
) -> None:
    """The registry dies after the first attachment, or after the last one and before the signature."""
    image, tags = stage(connect(own_server, "slipway"))
    doomed = DoomedRegistry(own_server, survives)
    with pytest.raises(BuildkitError):
        release(doomed, image, tags, record, LOCK, signer, own_server.ca)
    assert doomed.attached == survives
    assert own_server.tags("slipway").isdisjoint(tags.promoted)

    own_server.start()
    again = connect(own_server, "slipway")
    release(again, image, tags, record, LOCK, signer, own_server.ca)
    assert own_server.tags("slipway") >= set(tags.promoted)
    assert failures(check_published(again, "cpu", trust, own_server.ca)) == {}


PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path

from buildkit.registry.credentials import read_credentials
from buildkit.publishing.provenance import BuildRecord
from buildkit.publishing.release import Tags, promote, read_staged, sign_staged
from buildkit.recipe.lock import parse_lock
from buildkit.registry.reference import parse_reference
from buildkit.registry.client import Registry
from buildkit.registry.content import Descriptor
from buildkit.registry.credentials import Credentials
from buildkit.registry.signature import Signer
import json

given = json.loads(sys.argv[1])
reference, ca = parse_reference(given["repository"]), Path(given["ca"])
registry = Registry(reference, read_credentials(reference.host), ca)
tags = Tags(**given["tags"])
image = read_staged(registry, tags)
print("staged", flush=True)
sys.stdin.readline()
record, lock, signer = BuildRecord(**given["record"]), parse_lock(given["lock"]), Signer(given["key"])
promote(registry, sign_staged(registry, image, tags, record, lock, signer, ca))
"""


def test_interrupted_publisher_promotes_nothing_and_running_again_finishes(
    own_server: Server, own_login: None, record: BuildRecord, signer: Signer, trust: Trust
) -> None:
    registry = connect(own_server, "slipway")
    _, tags = stage(registry)
    given = {
        "repository": f"{own_server.host}/slipway",
        "ca": str(own_server.ca),
        "tags": tags.__dict__,
        "record": record.__dict__,
        "lock": LOCK.text,
        "key": signer.key,
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(given)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    publisher = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert publisher.stdout
    assert publisher.stdin
    assert publisher.stdout.readline() == "staged\n"
    own_server.signal(signal.SIGSTOP)  # the publisher's next request hangs
    publisher.stdin.write("go\n")
    publisher.stdin.flush()
    time.sleep(0.5)
    publisher.send_signal(signal.SIGINT)
    _, words = publisher.communicate(timeout=20)
    own_server.signal(signal.SIGCONT)
    assert "KeyboardInterrupt" in words
    assert own_server.tags("slipway").isdisjoint(tags.promoted)
    done = subprocess.run(command, env=environment, input="go\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert failures(check_published(registry, "cpu", trust, own_server.ca)) == {}


# ---- what verification finds -----------------------------------------------------------------------------------------


def test_manifest_changed_in_the_storage_is_refused(
    released: tuple[Registry, Tags], own_server: Server, trust: Trust
) -> None:
    registry, _ = released
    manifest = registry.manifest("cpu")
    assert manifest
    changed = manifest.body.replace(b"tar+gzip", b"tar+zstd", 1)
    own_server.blob_path(manifest.descriptor.digest).write_bytes(changed)
    with pytest.raises(RegistryError, match=r"tampered|refuses"):
        check_published(registry, manifest.descriptor.digest, trust, own_server.ca)


def test_moved_tag_is_not_covered_by_the_signature(
    released: tuple[Registry, Tags], own_server: Server, trust: Trust
) -> None:
    registry, _ = released
    layers = [*base_layers(), {"opt/slipway/app/evil.py": "import os"}]
    push_image(registry, "cpu", layers)
    failed = failures(check_published(registry, "cpu", trust, own_server.ca))
    assert set(failed) == {"signature", "tag", "layers", "sbom cyclonedx", "sbom spdx", "provenance"}
    assert "no signature by the key" in failed["signature"]


def test_a_tag_moved_to_another_signed_image_is_found(
    released: tuple[Registry, Tags], own_server: Server, record: BuildRecord, signer: Signer, trust: Trust
) -> None:
    """The other image has our signature, too: only the signed tags tell that it is not what was asked for."""
    registry, tags = released
    layers = [*base_layers(), {"etc/slipway/image.json": json.dumps(image_json() | {"target": "rocm"})}]
    digest = push_image(registry, "other", layers, {**LABELS, "dev.slipway.target": "rocm"})
    other = replace(choose_tags("rocm", "small", True, "0.1.0", LOCK_DIGEST, digest), staging="other")
    image = read_staged(registry, other)
    release(registry, image, other, replace(record, target="rocm"), LOCK, signer, own_server.ca)
    for tag in ("cpu", tags.version, tags.immutable, "mirrored"):
        registry.put_manifest(tag, image.manifest.body, image.manifest.descriptor.media_type)
        failed = failures(check_published(registry, tag, trust, own_server.ca, quick=True))
        assert set(failed) == {"tag"}
        assert f"it was published as {', '.join(other.promoted)}, and not as {tag}" in failed["tag"]
    for name in ("rocm", digest):
        assert failures(check_published(registry, name, trust, own_server.ca)) == {}
    for name, asked in (("mirrored", "rocm"), (digest, "rocm-small")):
        assert failures(check_published(registry, name, trust, own_server.ca, published_as=asked)) == {}
    assert set(failures(check_published(registry, digest, trust, own_server.ca, published_as="cpu"))) == {"tag"}


def test_layer_changed_in_the_storage_is_found(
    released: tuple[Registry, Tags], own_server: Server, trust: Trust
) -> None:
    registry, _ = released
    manifest = registry.manifest("cpu")
    assert manifest
    path = own_server.blob_path(manifest.layers[1].digest)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    failed = failures(check_published(registry, "cpu", trust, own_server.ca))
    assert "tampered with or damaged" in failed["layers"]


def test_missing_layer_is_found_without_reading_layers(
    released: tuple[Registry, Tags], own_server: Server, trust: Trust
) -> None:
    registry, _ = released
    manifest = registry.manifest("cpu")
    assert manifest
    own_server.blob_path(manifest.layers[0].digest).unlink()
    failed = failures(check_published(registry, "cpu", trust, own_server.ca, quick=True))
    assert set(failed) == {"layers"}


def test_swapped_sbom_is_found(released: tuple[Registry, Tags], own_server: Server, trust: Trust) -> None:
    """Somebody with write access attaches another SBOM and removes the true one from the list of referrers."""
    registry, _ = released
    manifest = registry.manifest("cpu")
    assert manifest
    digest = manifest.descriptor.digest
    kept = [entry.as_json() for entry in registry.referrers(digest) if "cyclonedx" not in entry.artifact_type]
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": kept}
    registry.put_manifest(digest.replace(":", "-"), json.dumps(index).encode(), index["mediaType"])
    registry.attach(manifest.descriptor, "application/vnd.cyclonedx+json", b'{"bomFormat": "CycloneDX"}', {})
    failed = failures(check_published(registry, "cpu", trust, own_server.ca))
    assert set(failed) == {"sbom cyclonedx"}


def test_signature_is_not_accepted_with_another_key(
    released: tuple[Registry, Tags], own_server: Server, tmp_path: Path
) -> None:
    environment = {**os.environ, "COSIGN_PASSWORD": ""}
    subprocess.run(["cosign", "generate-key-pair"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    registry, _ = released
    failed = failures(check_published(registry, "cpu", Trust(key=str(tmp_path / "cosign.pub")), own_server.ca))
    assert "signature" in failed


def forged_provenance(image: PublishedImage, record: BuildRecord) -> bytes:
    """A statement that fits the image, its lock and its commit, and says who did not build it."""
    liar = provenance.Builder("https://builder.example/trusted", "", "git+https://source.example")
    return provenance.encode(provenance.statement("slipway", image.digest, record, liar))


def attached_provenance(registry: Registry, publication: Publication) -> bytes:
    manifest = registry.manifest(publication.attachments["provenance"])
    assert manifest
    return registry.blob(manifest.layers[0])


def test_provenance_is_an_envelope_that_a_stranger_checks_with_cosign_alone(
    registry: Registry,
    record: BuildRecord,
    signer: Signer,
    trust: Trust,
    login: None,
    shared_server: Server,
    tmp_path: Path,
) -> None:
    image, tags = stage(registry)
    publication = release(registry, image, tags, record, LOCK, signer, shared_server.ca)
    envelope, manifest = tmp_path / "provenance.json", tmp_path / "manifest.json"
    envelope.write_bytes(attached_provenance(registry, publication))
    manifest.write_bytes(image.manifest.body)  # its digest is the statement's subject
    options = ["--insecure-ignore-tlog=true", "--type", "slsaprovenance1", "--signature", str(envelope)]
    command = ["cosign", "verify-blob-attestation", "--key", trust.key, *options, str(manifest)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    manifest.write_bytes(image.manifest.body + b" ")
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_an_envelope_of_another_key_is_refused(
    registry: Registry, record: BuildRecord, signer: Signer, trust: Trust, tmp_path: Path
) -> None:
    environment = {**os.environ, "COSIGN_PASSWORD": ""}
    subprocess.run(["cosign", "generate-key-pair"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    image, _ = stage(registry)
    document = provenance.statement("slipway", image.digest, record, provenance.read_builder({}))
    assert "built by" in check_provenance(image, dsse.seal(document, signer), trust)
    with pytest.raises(TrustError, match="did not sign it"):
        check_provenance(image, dsse.seal(document, Signer(str(tmp_path / "cosign.key"))), trust)
    with pytest.raises(TrustError, match="did not sign it"):
        check_provenance(image, dsse.seal(document, None), trust)


def test_provenance_that_somebody_else_attached_is_not_signed(
    registry: Registry, record: BuildRecord, signer: Signer, login: None, shared_server: Server
) -> None:
    image, tags = stage(registry)
    registry.attach(image.manifest.descriptor, provenance.MEDIA_TYPE, forged_provenance(image, record), {})
    publication = release(registry, image, tags, record, LOCK, signer, shared_server.ca)
    statement, _ = dsse.open_envelope(attached_provenance(registry, publication))
    assert b"slipway.dev/buildkit/local" in statement


@pytest.mark.parametrize(
    ("field", "value", "subject"),
    [("lock", "sha256:" + "0" * 64, "lock"), ("revision", "0" * 40, "source revision")],
)
def test_provenance_of_another_build_is_neither_signed_nor_promoted(
    registry: Registry,
    record: BuildRecord,
    signer: Signer,
    login: None,
    shared_server: Server,
    field: str,
    value: str,
    subject: str,
) -> None:
    image, tags = stage(registry)
    with pytest.raises(TrustError, match=f"about another {subject}"):
        release(registry, image, tags, replace(record, **{field: value}), LOCK, signer, shared_server.ca)
    assert registry.manifest(tags.immutable) is None


def test_damaged_attachment_is_found(released: tuple[Registry, Tags], own_server: Server, trust: Trust) -> None:
    registry, _ = released
    manifest = registry.manifest("cpu")
    assert manifest
    entry = next(entry for entry in registry.referrers(manifest.descriptor.digest) if "spdx" in entry.artifact_type)
    artifact = registry.manifest(entry.digest)
    assert artifact
    own_server.blob_path(artifact.layers[0].digest).write_bytes(b"{}")
    failed = failures(check_published(registry, "cpu", trust, own_server.ca))
    assert set(failed) == {"sbom spdx"}
    assert "tampered with or damaged" in failed["sbom spdx"]
