"""The content of a registry: descriptors, manifests and blobs, each checked against its digest.

https://github.com/opencontainers/image-spec/blob/main/spec.md.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import requests

from buildkit.errors import RegistryError
from buildkit.registry.answers import BLOCK, MALFORMED, broken_off

IMAGE = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_IMAGE = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
EMPTY = "application/vnd.oci.empty.v1+json"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MANIFESTS = (IMAGE, DOCKER_IMAGE, INDEX, DOCKER_LIST)

TAMPERED = "do not use this image; publish it again, and find out who can write to the registry's storage"


@dataclass(frozen=True)
class Descriptor:
    """Points at content (https://github.com/opencontainers/image-spec/blob/main/descriptor.md). `size` is in bytes."""

    media_type: str
    digest: str
    size: int
    artifact_type: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> "Descriptor":
        """Raises `RegistryError` for a value that is no descriptor."""
        try:
            required = str(value["mediaType"]), str(value["digest"]), value["size"]
            optional = value.get("artifactType") or "", value.get("annotations") or {}
        except (KeyError, TypeError, AttributeError):
            required, optional = ("", "", None), ("", {})
        kind, digest, size = required
        if not (type(size) is int and size >= 0 and DIGEST.fullmatch(digest) and isinstance(optional[1], Mapping)):
            raise RegistryError(f"the registry sent no valid OCI descriptor: {repr(value)[:200]}", MALFORMED)
        return cls(kind, digest, size, str(optional[0]), optional[1])

    def as_json(self) -> dict[str, Any]:
        optional = {"artifactType": self.artifact_type, "annotations": dict(self.annotations)}
        required = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return {**required, **{name: value for name, value in optional.items() if value}}


@dataclass(frozen=True)
class Manifest:
    """A manifest with its exact bytes, over which its digest is computed."""

    descriptor: Descriptor
    body: bytes

    @property
    def content(self) -> dict[str, Any]:
        return read_object(self.body)

    @property
    def layers(self) -> list[Descriptor]:
        return descriptors(self.content, "layers")

    @property
    def config(self) -> Descriptor:
        return Descriptor.read(self.content.get("config", {}))

    @property
    def subject(self) -> str:
        """The digest of the manifest that this one refers to, or empty."""
        return Descriptor.read(self.content["subject"]).digest if self.content.get("subject") else ""


class BlobStream:
    """A blob as a file that can be read once, from front to back; `check` compares its digest at the end."""

    def __init__(self, answer: requests.Response, blob: Descriptor, repository: str) -> None:
        self._chunks: Iterator[bytes] = answer.iter_content(BLOCK)
        self._answer, self._blob, self._repository = answer, blob, repository
        self._hash, self._buffer, self._received = hashlib.sha256(), bytearray(), 0

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes, or all. Raises `RegistryError` when the blob is longer than its descriptor says."""
        while size < 0 or len(self._buffer) < size:
            try:
                chunk = next(self._chunks, b"")
            except requests.RequestException as error:
                raise broken_off(self._repository, self._blob.digest, error) from error
            if not chunk:
                break
            self._received += len(chunk)
            if self._received > self._blob.size:
                raise RegistryError(
                    f"{self._repository} sends more than the {self._blob.size} bytes of blob {self._blob.digest}: "
                    "it was tampered with or damaged",
                    TAMPERED,
                )
            self._hash.update(chunk)
            self._buffer += chunk
        size = len(self._buffer) if size < 0 else size
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece

    def check(self) -> None:
        """Reads the rest. Raises `RegistryError` when the content does not have the blob's digest."""
        while self.read(BLOCK):
            pass
        digest = f"sha256:{self._hash.hexdigest()}"
        if digest != self._blob.digest:
            raise RegistryError(
                f"{self._repository} sends {digest} for blob {self._blob.digest}: it was tampered with or damaged",
                TAMPERED,
            )

    def close(self) -> None:
        self._answer.close()

    def as_file(self) -> BinaryIO:
        return cast(BinaryIO, self)


def read_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises `RegistryError` for anything else."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RegistryError(f"the registry sent no JSON: {body[:60]!r}", MALFORMED) from error
    if not isinstance(content, dict):
        raise RegistryError(f"the registry sent no JSON object: {body[:60]!r}", MALFORMED)
    return content


def read_config(body: bytes) -> tuple[dict[str, str], tuple[str, ...]]:
    """The labels in an image's configuration, and the digests of its layers' tars. Raises `RegistryError`."""
    config = read_object(body)
    try:
        labels = dict((config.get("config") or {}).get("Labels") or {})
        diff_ids = list(config["rootfs"]["diff_ids"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RegistryError("this configuration is no image's", "name one image by its digest") from error
    if not all(isinstance(text, str) for text in (*labels.values(), *diff_ids)):
        raise RegistryError("this configuration has labels or digests that are no text", "name one image by its digest")
    return labels, tuple(diff_ids)


def descriptors(content: Mapping[str, Any], name: str) -> list[Descriptor]:
    """A list of descriptors; empty if it is absent or null. Raises `RegistryError` for anything else."""
    values = content.get(name) or []
    if not isinstance(values, list):
        raise RegistryError(f"the registry sent {name} that are no list: {repr(values)[:60]}", MALFORMED)
    return [Descriptor.read(value) for value in values]


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
