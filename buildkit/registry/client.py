"""Speaks to an image registry: the OCI distribution API 1.1 over HTTPS, with referrers and their fall-back.

https://github.com/opencontainers/distribution-spec/blob/main/spec.md. Blobs are sent in one piece: what is attached to
an image is small; the image itself is pushed by the engine, which knows what the registry has already.
"""

import hashlib
import json
import logging
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies

import requests

from buildkit.errors import RegistryError
from buildkit.registry.credentials import Anonymous, Credentials, authorize, trusted_ca
from buildkit.registry.reference import Reference

log = logging.getLogger(__name__)

IMAGE = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_IMAGE = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
EMPTY = "application/vnd.oci.empty.v1+json"
MANIFESTS = (IMAGE, DOCKER_IMAGE, INDEX, DOCKER_LIST)

TIMEOUT = (10, 60)  # seconds to connect, and between two pieces of an answer
PATIENCE = 60.0  # seconds in which a registry that stumbles is asked again
LIMIT = 2**26  # bytes of a manifest or an attachment; more is refused
BLOCK = 2**20
MALFORMED = "is this an image registry? see what the address answers with `curl`"
TAMPERED = "do not use this image; publish it again, and find out who can write to the registry's storage"
BUSY = {408, 429, 500, 502, 503, 504}


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
        """Raises `RegistryError` for what is no descriptor."""
        try:
            required = str(value["mediaType"]), str(value["digest"]), int(value["size"])
            return cls(*required, value.get("artifactType", ""), value.get("annotations") or {})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RegistryError(f"the registry sends what is no OCI descriptor: {value!r}", MALFORMED) from error

    def as_json(self) -> dict[str, Any]:
        optional = {"artifactType": self.artifact_type, "annotations": dict(self.annotations)}
        required = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return {**required, **{name: value for name, value in optional.items() if value}}


@dataclass(frozen=True)
class Manifest:
    """A manifest as the registry keeps it: its very bytes, and what they say."""

    descriptor: Descriptor
    body: bytes

    @property
    def content(self) -> dict[str, Any]:
        return read_object(self.body)

    @property
    def layers(self) -> list[Descriptor]:
        return [Descriptor.read(layer) for layer in self.content.get("layers", [])]

    @property
    def config(self) -> Descriptor:
        return Descriptor.read(self.content.get("config", {}))


def read_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises `RegistryError` for anything else."""
    try:
        content = json.loads(body)
    except ValueError as error:
        raise RegistryError(f"the registry sends what is no JSON: {body[:60]!r}", MALFORMED) from error
    if not isinstance(content, dict):
        raise RegistryError(f"the registry sends what is no JSON object: {body[:60]!r}", MALFORMED)
    return content


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Registry:
    """One repository of a registry. Every method raises `RegistryError` that names the registry and the way out."""

    def __init__(
        self, reference: Reference, credentials: Credentials, ca: Path | None = None, patience: float = PATIENCE
    ):
        self.reference = reference
        self.patience = patience
        self._credentials = credentials
        self._base = f"{'https' if reference.secure else 'http'}://{reference.host}/v2/{reference.repository}/"
        self._session = requests.Session()
        self._session.trust_env = False  # credentials come from docker's configuration, never from ~/.netrc
        self._session.proxies = getproxies() if needs_proxy(self._base) else {}
        self._session.verify = str(trusted_ca(reference.host, ca) or True) if reference.secure else False

    # ---- manifests and tags

    def manifest(self, name: str) -> Manifest | None:
        """The manifest of a tag or digest, or None. What does not have its digest is an error."""
        answer = self._send("GET", f"manifests/{name}", accept=", ".join(MANIFESTS), allowed={404}, stream=True)
        if answer.status_code == 404:
            answer.close()
            return None
        with closing(answer):
            body = self._read_limited(answer, name)
        digest = digest_of(body)
        claimed = name if name.startswith("sha256:") else answer.headers.get("Docker-Content-Digest", digest)
        if digest != claimed:
            raise RegistryError(
                f"{self.reference.host} answers {claimed} with {digest}: it was tampered with or damaged",
                TAMPERED,
            )
        media_type = answer.headers.get("Content-Type", "").partition(";")[0]
        return Manifest(Descriptor(media_type, digest, len(body)), body)

    def _read_limited(self, answer: requests.Response, name: str) -> bytes:
        body = bytearray()
        try:
            for chunk in answer.iter_content(BLOCK):
                body += chunk
                if len(body) > LIMIT:
                    raise RegistryError(
                        f"manifest {name} in {self.reference.name} has more than {LIMIT} bytes, the limit",
                        "do not use this image; find out who published it",
                    )
        except requests.RequestException as error:
            raise broken_off(self.reference.name, f"manifest {name}", error) from error
        return bytes(body)

    def put_manifest(self, name: str, body: bytes, media_type: str) -> requests.Response:
        return self._send("PUT", f"manifests/{name}", data=body, content_type=media_type)

    # ---- blobs

    def has_blob(self, blob: Descriptor) -> bool:
        answer = self._send("HEAD", f"blobs/{blob.digest}", allowed={404})
        return answer.status_code == 200 and int(answer.headers.get("Content-Length", blob.size)) == blob.size

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

    def open_blob(self, blob: Descriptor) -> "BlobStream":
        answer = self._send("GET", f"blobs/{blob.digest}", stream=True)
        return BlobStream(answer, blob, self.reference.name)

    def put_blob(self, content: bytes, media_type: str) -> Descriptor:
        blob = Descriptor(media_type, digest_of(content), len(content))
        if self.has_blob(blob):
            return blob
        started = self._send("POST", "blobs/uploads/")
        place = urljoin(started.url, started.headers["Location"])
        self._send("PUT", place, data=content, content_type="application/octet-stream", query={"digest": blob.digest})
        return blob

    def check_access(self) -> None:
        """Whether we may push: an upload is begun and given up."""
        started = self._send("POST", "blobs/uploads/")
        self._send("DELETE", urljoin(started.url, started.headers["Location"]), allowed=frozenset(range(400, 500)))

    # ---- referrers: manifests with a `subject`

    def referrers(self, digest: str) -> list[Descriptor]:
        """What refers to a manifest, through the API where the registry has it, else through the fall-back tag."""
        answer = self._send("GET", f"referrers/{digest}", accept=INDEX, allowed={404})
        if answer.status_code == 200:
            return [Descriptor.read(entry) for entry in read_object(answer.content).get("manifests", [])]
        return self._fallback(digest)

    def attach(
        self, subject: Descriptor, artifact_type: str, content: bytes, annotations: Mapping[str, str]
    ) -> Descriptor:
        """Pushes content as an artifact that refers to `subject`. Doing it twice changes nothing."""
        config = self.put_blob(b"{}", EMPTY)
        layer = self.put_blob(content, artifact_type)
        manifest = {
            "schemaVersion": 2,
            "mediaType": IMAGE,
            "artifactType": artifact_type,
            "config": config.as_json(),
            "layers": [layer.as_json()],
            "subject": subject.as_json(),
            "annotations": dict(annotations),
        }
        body = json.dumps(manifest, sort_keys=True).encode()
        artifact = Descriptor(IMAGE, digest_of(body), len(body), artifact_type, annotations)
        answer = self.put_manifest(artifact.digest, body, IMAGE)
        if "OCI-Subject" not in answer.headers:
            self._add_to_fallback(subject.digest, artifact)
        return artifact

    def _fallback(self, digest: str) -> list[Descriptor]:
        index = self.manifest(fallback_tag(digest))
        return [Descriptor.read(entry) for entry in index.content.get("manifests", [])] if index else []

    def _add_to_fallback(self, digest: str, artifact: Descriptor) -> None:
        present = self._fallback(digest)
        if artifact.digest in {entry.digest for entry in present}:
            return
        entries = [entry.as_json() for entry in (*present, artifact)]
        body = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}, sort_keys=True).encode()
        self.put_manifest(fallback_tag(digest), body, INDEX)

    # ---- HTTP

    def _send(
        self,
        method: str,
        path: str,
        *,
        data: bytes | None = None,
        accept: str = "",
        content_type: str = "",
        query: Mapping[str, str] | None = None,
        allowed: set[int] | frozenset[int] = frozenset(),
        stream: bool = False,
    ) -> requests.Response:
        """One request, repeated while the registry stumbles. A status above 399 is an error unless it is `allowed`."""
        headers = {"Accept": accept or "*/*"}
        if content_type:
            headers["Content-Type"] = content_type
        request = requests.Request(method, urljoin(self._base, path), headers, data=data, params=query)
        end, pause = time.monotonic() + self.patience, 0.25
        while True:
            answer = self._try(request, stream)
            if isinstance(answer, requests.Response):
                if answer.status_code < 400 or answer.status_code in allowed:
                    return answer
                problem = explain(answer)
                if answer.status_code not in BUSY or is_full(problem):
                    raise refusal(self.reference, method, answer, problem)
            else:
                problem = answer
            if time.monotonic() + pause > end:
                raise RegistryError(
                    f"{self.reference.host} did not answer {method} {path.partition('?')[0]} within "
                    f"{self.patience:.0f} s: {problem}",
                    "look at the registry, then run the same command again: what it has already is not sent twice",
                )
            log.info("registry: %s; asking again in %.1f s", problem, pause)
            time.sleep(pause)
            pause = min(2 * pause, 8)

    def _try(self, request: requests.Request, stream: bool) -> requests.Response | str:
        """The answer, with credentials where the registry asks for them; or, in words, why there is none."""
        try:
            answer = self._session.send(self._prepare(request), stream=stream, timeout=TIMEOUT)
            if answer.status_code == 401 and self._is_ours(answer.url):
                push = request.method not in ("GET", "HEAD")
                authorize(self._session, answer, self._credentials, self.reference, push)
                answer = self._session.send(self._prepare(request), stream=stream, timeout=TIMEOUT)
            return answer
        except requests.RequestException as error:
            cause = innermost(error)
            if not isinstance(cause, ssl.SSLCertVerificationError):
                return str(cause)
            raise RegistryError(
                f"{self.reference.host} has no certificate that this host trusts: {cause.verify_message}",
                "name its authority with --registry-ca FILE, or put it into "
                f"/etc/docker/certs.d/{self.reference.host}/ca.crt",
            ) from error

    def _prepare(self, request: requests.Request) -> requests.PreparedRequest:
        if not self._is_ours(request.url):  # registries send uploads to storage elsewhere
            request.auth = Anonymous()
        return self._session.prepare_request(request)

    def _is_ours(self, url: str) -> bool:
        """Whether the registry's credentials may go to this address."""
        asked, ours = urlsplit(url), urlsplit(self._base)
        return (asked.scheme, asked.netloc) == (ours.scheme, ours.netloc)


class BlobStream:
    """A blob as a file that can be read once, from front to back; `check` compares what was read with the digest."""

    def __init__(self, answer: requests.Response, blob: Descriptor, place: str) -> None:
        self._chunks: Iterator[bytes] = answer.iter_content(BLOCK)
        self._answer, self._blob, self._place = answer, blob, place
        self._hash, self._buffer, self._received = hashlib.sha256(), bytearray(), 0

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._buffer) < size:
            try:
                chunk = next(self._chunks, b"")
            except requests.RequestException as error:
                raise broken_off(self._place, self._blob.digest, error) from error
            if not chunk:
                break
            self._received += len(chunk)
            if self._received > self._blob.size:
                raise RegistryError(
                    f"{self._place} sends more than the {self._blob.size} bytes of blob {self._blob.digest}: "
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
        while self.read(BLOCK):
            pass
        found = f"sha256:{self._hash.hexdigest()}"
        if found != self._blob.digest:
            raise RegistryError(
                f"{self._place} sends {found} for blob {self._blob.digest}: it was tampered with or damaged",
                TAMPERED,
            )

    def close(self) -> None:
        self._answer.close()

    def as_file(self) -> BinaryIO:
        return cast(BinaryIO, self)


def fallback_tag(digest: str) -> str:
    return digest.replace(":", "-")


def needs_proxy(url: str) -> bool:
    return not requests.utils.should_bypass_proxies(url, no_proxy=None)


def innermost(error: BaseException) -> BaseException:
    """The first cause: requests wraps it three times."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def broken_off(place: str, what: str, error: requests.RequestException) -> RegistryError:
    return RegistryError(f"{place} broke off while sending {what}: {innermost(error)}", "run the same command again")


def explain(answer: requests.Response) -> str:
    """What the registry itself says about a failure."""
    try:
        errors = answer.json()["errors"]
        words = "; ".join(
            f"{entry.get('message') or entry['code']} {entry.get('detail') or ''}".strip() for entry in errors
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        words = answer.reason or "no reason given"
    return f"HTTP {answer.status_code}: {words}"


def is_full(problem: str) -> bool:
    """Debian's docker-registry hands out the system's own error, with its number (28, ENOSPC)."""
    return "no space left" in problem or "'Err': 28" in problem


def refusal(reference: Reference, method: str, answer: requests.Response, problem: str) -> RegistryError:
    what = f"{reference.host} refuses {method} {answer.request.path_url.partition('?')[0]}: {problem}"
    if is_full(problem):
        return RegistryError(f"{reference.host} has no space left: {problem}", "make room there, then run this again")
    if answer.status_code in (401, 403):
        return RegistryError(
            what, f"run `docker login {reference.host}` as a user who may push to {reference.repository}"
        )
    return RegistryError(what, "see the registry's own words above")
