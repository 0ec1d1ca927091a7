"""A client for one repository of an image registry: the OCI distribution API 1.1, with referrers and their fall-back.

https://github.com/opencontainers/distribution-spec/blob/main/spec.md. Blobs are sent in one piece, and only those
that the registry lacks.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import requests

from buildkit.errors import RegistryError
from buildkit.registry.answers import ANSWER_LIMIT, MALFORMED, read_limited, resolve
from buildkit.registry.content import (
    EMPTY,
    IMAGE,
    INDEX,
    MANIFESTS,
    TAMPERED,
    BlobStream,
    Descriptor,
    Manifest,
    descriptors,
    digest_of,
    read_object,
)
from buildkit.registry.credentials import Credentials
from buildkit.registry.reference import Reference
from buildkit.registry.transport import Transport

PATIENCE = 60.0  # seconds for which a failing request is repeated
LIMIT = 2**26  # bytes of an attachment; more is refused
PAGES = 100  # of a list of referrers


class Registry:
    """One repository of a registry. Every method raises `RegistryError` that names the registry and a fix."""

    def __init__(
        self, reference: Reference, credentials: Credentials, ca: Path | None = None, patience: float = PATIENCE
    ):
        self.reference = reference
        self._send = Transport(reference, credentials, ca, patience).send

    # ---- manifests and tags

    def manifest(self, name: str) -> Manifest | None:
        """The manifest of a tag or digest, checked against its digest; None if there is none."""
        answer = self._send("GET", f"manifests/{name}", accept=", ".join(MANIFESTS), allowed={404}, stream=True)
        with closing(answer):
            if answer.status_code == 404:
                return None
            body = read_limited(answer, ANSWER_LIMIT, self.reference.name, f"manifest {name}")
        digest = digest_of(body)
        claimed = name if name.startswith("sha256:") else answer.headers.get("Docker-Content-Digest", digest)
        if digest != claimed:
            raise RegistryError(
                f"{self.reference.host} sends {digest} for manifest {claimed}: it was tampered with or damaged",
                TAMPERED,
            )
        media_type = answer.headers.get("Content-Type", "").partition(";")[0]
        return Manifest(Descriptor(media_type, digest, len(body)), body)

    def put_manifest(self, name: str, body: bytes, media_type: str) -> requests.Response:
        return self._send("PUT", f"manifests/{name}", data=body, content_type=media_type)

    # ---- blobs

    def has_blob(self, blob: Descriptor) -> bool:
        answer = self._send("HEAD", f"blobs/{blob.digest}", allowed={404})
        length = answer.headers.get("Content-Length", "")
        return answer.status_code == 200 and (not length.isdecimal() or int(length) == blob.size)

    def blob(self, blob: Descriptor) -> bytes:
        """The content of a small blob, checked against its digest."""
        if blob.size > LIMIT:
            raise RegistryError(
                f"{blob.digest} in {self.reference.name} has {blob.size} bytes, more than the limit of {LIMIT}",
                "do not use this image; find out who published it",
            )
        with closing(self.open_blob(blob)) as stream:
            content = stream.read()
            stream.check()
        return content

    def open_blob(self, blob: Descriptor) -> BlobStream:
        answer = self._send("GET", f"blobs/{blob.digest}", stream=True)
        return BlobStream(answer, blob, self.reference.name)

    def put_blob(self, content: bytes, media_type: str) -> Descriptor:
        """Uploads content that the registry does not have yet."""
        blob = Descriptor(media_type, digest_of(content), len(content))
        if self.has_blob(blob):
            return blob
        upload = self._start_upload()
        self._send("PUT", upload, data=content, content_type="application/octet-stream", query={"digest": blob.digest})
        return blob

    def put_file(self, path: Path, blob: Descriptor) -> None:
        """Uploads a file's content, which `blob` describes, unless the registry has it."""
        if self.has_blob(blob):
            return
        upload = self._start_upload()
        with path.open("rb") as file:
            self._send("PUT", upload, data=file, content_type="application/octet-stream", query={"digest": blob.digest})

    def _start_upload(self) -> str:
        started = self._send("POST", "blobs/uploads/")
        if "Location" not in started.headers:
            raise RegistryError(f"{self.reference.host} starts an upload without a Location", MALFORMED)
        return resolve(started.url, started.headers["Location"], self.reference.host)

    def check_access(self) -> None:
        """Starts an upload and cancels it. Raises `RegistryError` when we may not push."""
        self._send("DELETE", self._start_upload(), allowed=frozenset(range(400, 500)))

    # ---- referrers: manifests with a `subject`

    def referrers(self, digest: str) -> list[Descriptor]:
        """The manifests that refer to a manifest, from the referrers API or, without one, from the fall-back tag."""
        page, entries = f"referrers/{digest}", []
        for _ in range(PAGES):
            answer = self._send("GET", page, accept=INDEX, allowed={404})
            if answer.status_code == 404:
                return self._fallback(digest)
            entries += descriptors(read_object(answer.content), "manifests")
            following = answer.links.get("next", {}).get("url")
            if not following:
                return entries
            page = resolve(answer.url, following, self.reference.host)
        raise RegistryError(f"{self.reference.host} lists more than {PAGES} pages of referrers of {digest}", MALFORMED)

    def attach(
        self, subject: Descriptor, artifact_type: str, content: bytes, annotations: Mapping[str, str]
    ) -> Descriptor:
        """Pushes content as an artifact that refers to `subject`. Repeating it changes nothing."""
        return self.put_artifact(self.put_blob(content, artifact_type), artifact_type, annotations, subject)

    def put_artifact(
        self,
        layer: Descriptor,
        artifact_type: str,
        annotations: Mapping[str, str],
        subject: Descriptor | None = None,
        tag: str = "",
    ) -> Descriptor:
        """Pushes the manifest of an artifact whose blob is there, with a tag or as a referrer of `subject`, or both."""
        manifest = {
            "schemaVersion": 2,
            "mediaType": IMAGE,
            "artifactType": artifact_type,
            "config": self.put_blob(b"{}", EMPTY).as_json(),
            "layers": [layer.as_json()],
            **({"subject": subject.as_json()} if subject else {}),
            "annotations": dict(annotations),
        }
        body = json.dumps(manifest, sort_keys=True).encode()
        artifact = Descriptor(IMAGE, digest_of(body), len(body), artifact_type, annotations)
        answer = self.put_manifest(tag or artifact.digest, body, IMAGE)
        if subject and "OCI-Subject" not in answer.headers:
            self._add_to_fallback(subject.digest, artifact)
        return artifact

    def _fallback(self, digest: str) -> list[Descriptor]:
        index = self.manifest(fallback_tag(digest))
        return descriptors(index.content, "manifests") if index else []

    def _add_to_fallback(self, digest: str, artifact: Descriptor) -> None:
        present = self._fallback(digest)
        if artifact.digest in {entry.digest for entry in present}:
            return
        entries = [entry.as_json() for entry in (*present, artifact)]
        body = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}, sort_keys=True).encode()
        self.put_manifest(fallback_tag(digest), body, INDEX)


def fallback_tag(digest: str) -> str:
    return digest.replace(":", "-")
