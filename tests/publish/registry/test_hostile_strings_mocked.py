"""Whatever a registry sends in a header or a document, the client uses or refuses it. The registry is mocked.

Names other than this host's do not resolve, so no address in an answer leads anywhere.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from buildkit.errors import RegistryError, TrustError
from buildkit.publishing.check import PublishedImage, check_labels, fetch_attachment, find_image
from buildkit.registry.client import Registry
from buildkit.registry.content import IMAGE, Descriptor, Manifest, digest_of
from buildkit.registry.credentials import Credentials
from buildkit.registry.reference import Reference
from tests.serving import serving

CONTENT = b"content"
BLOB = Descriptor("text/plain", digest_of(CONTENT), len(CONTENT))

LATIN = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=30)
ADDRESSES = st.one_of(
    LATIN,
    st.builds(
        "".join,
        st.tuples(
            st.sampled_from(["http://", "https://", "//", "", "file://", "http:/", "HTTP://", "://"]),
            st.sampled_from(
                ["127.0.0.1", "[::1", "[::1]", "[x]", "a..b", "\xe9\xad", "x" * 70, "", "u:p@h", "%zz", "\x7f"]
            ),
            st.sampled_from(["", ":", ":0", ":1", ":99999", ":abc", ":-1"]),
            st.sampled_from(["", "/", "/a b", "/\xff", "?\xe9=1", "#f", "/%", "/../.."]),
        ),
    ),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["sha256:0", IMAGE]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@dataclass
class Answers:
    """The mocked registry's answers: status, headers and body by method, or by the end of a path."""

    content: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    port: int = 0

    def registry(self) -> Registry:
        reference = Reference(f"127.0.0.1:{self.port}", "slipway", secure=False)
        return Registry(reference, Credentials("user", "password"), patience=0)


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            name = next((name for name in answers.content if self.path.endswith(name)), self.command)
            status, headers, body = answers.content.get(name, (404, {}, b""))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    def resolve(host: str, *rest: Any, **options: Any) -> Any:
        if host != "127.0.0.1":
            raise socket.gaierror(f"{host} is not this host")
        return known(host, *rest, **options)

    for method in ("GET", "HEAD", "POST", "PUT"):
        setattr(Handler, f"do_{method}", Handler.answer)
    known = socket.getaddrinfo
    with pytest.MonkeyPatch.context() as patch, serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        patch.setattr(socket, "getaddrinfo", resolve)
        patch.setattr("buildkit.registry.client.PAGES", 3)  # some answers lead to themselves
        answers.port = server.server_port
        yield answers


def used_or_refused(work: Any, *arguments: Any) -> None:
    with suppress(RegistryError, TrustError):
        work(*arguments)


several = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@several
@given(address=ADDRESSES)
@example("http://[::1/upload")
@example("http://127.0.0.1:abc/upload")
@example("http://a..b/upload")
def test_any_location_of_an_upload(answers: Answers, address: str) -> None:
    answers.content = {"POST": (202, {"Location": address}, b""), "PUT": (201, {}, b"")}
    used_or_refused(answers.registry().put_blob, CONTENT, "text/plain")


@several
@given(address=ADDRESSES, status=st.sampled_from([301, 302, 303, 307, 308]))
@example("http://[::1/blob", 307)
@example("http://127.0.0.1:abc/blob", 307)
@example("\xff", 307)
def test_any_location_of_a_redirect(answers: Answers, address: str, status: int) -> None:
    answers.content = {"GET": (status, {"Location": address}, b"")}
    used_or_refused(answers.registry().blob, BLOB)


@several
@given(value=LATIN | ADDRESSES.map('<{}>; rel="next"'.format))
@example('<http://[::1/next>; rel="next"')
def test_any_link(answers: Answers, value: str) -> None:
    answers.content = {"GET": (200, {"Link": value}, b"{}")}
    used_or_refused(answers.registry().referrers, BLOB.digest)


@several
@given(value=LATIN | ADDRESSES.map('Bearer realm="{}",service="s"'.format))
@example('Bearer realm="http://[::1/token",service="s"')
@example('Bearer realm="127.0.0.1",service="s"')
def test_any_challenge(answers: Answers, value: str) -> None:
    answers.content = {"GET": (401, {"WWW-Authenticate": value}, b"")}
    used_or_refused(answers.registry().manifest, "cpu")


@several
@given(token=JSON | LATIN)
@example("\u2603")
@example("\ud800")
@example("a\r\nHost: b")
@example(["a"])
def test_any_token(answers: Answers, token: Any) -> None:
    challenge = f'Bearer realm="http://127.0.0.1:{answers.port}/token",service="s"'
    answers.content = {
        "GET": (401, {"WWW-Authenticate": challenge}, b""),
        "service=s": (200, {}, json.dumps({"token": token}).encode()),
    }
    used_or_refused(answers.registry().manifest, "cpu")


@several
@given(kind=LATIN, digest=LATIN, length=LATIN)
def test_any_media_type_digest_and_length(answers: Answers, kind: str, digest: str, length: str) -> None:
    headers = {"Content-Type": kind, "Docker-Content-Digest": digest}
    answers.content = {"GET": (200, headers, b"{}"), "HEAD": (200, {"Content-Length": length}, b"")}
    used_or_refused(find_image, answers.registry(), "cpu")
    used_or_refused(answers.registry().has_blob, BLOB)


@several
@given(status=st.integers(400, 599), body=st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
@example(400, b'{"errors": [{"code": "\\ud800", "message": {"a": 1}}]}')
@example(500, b'{"errors": {"a": 1}}')
def test_any_reason_of_a_refusal(answers: Answers, status: int, body: bytes) -> None:
    answers.content = {"GET": (status, {}, body)}
    used_or_refused(answers.registry().manifest, "cpu")


def test_a_reason_cannot_control_the_terminal(answers: Answers) -> None:
    answers.content = {"GET": (400, {}, json.dumps({"errors": [{"message": "\x1b[2Jgone \u2713"}]}).encode())}
    with pytest.raises(RegistryError) as caught:
        answers.registry().manifest("cpu")
    assert str(caught.value).endswith("HTTP 400: \\x1b[2Jgone \u2713")


@several
@given(manifest=st.dictionaries(st.sampled_from(["config", "layers", "subject", "manifests", "mediaType"]), JSON))
@example({"subject": None, "layers": [BLOB.as_json()]})
@example({"subject": ["a"], "layers": [BLOB.as_json()]})
def test_any_manifest(answers: Answers, manifest: dict[str, Any]) -> None:
    body = json.dumps(manifest).encode()
    answers.content = {"GET": (200, {}, body)}
    used_or_refused(find_image, answers.registry(), "cpu")
    used_or_refused(answers.registry().referrers, BLOB.digest)
    image = PublishedImage(Manifest(BLOB, CONTENT), {}, ())
    artifact = Descriptor(IMAGE, digest_of(body), len(body))
    used_or_refused(fetch_attachment, answers.registry(), image, artifact)


LABELS = st.dictionaries(st.sampled_from(["dev.slipway.lock", "org.opencontainers.image.revision"]), JSON)


@several
@given(config=JSON | st.fixed_dictionaries({"config": st.fixed_dictionaries({"Labels": LABELS}), "rootfs": JSON}))
@example({"config": {"Labels": {"dev.slipway.lock": 1}}, "rootfs": {"diff_ids": []}})
@example({"config": {"Labels": None}, "rootfs": {"diff_ids": "sha256:0"}})
@example({"config": None, "rootfs": {"diff_ids": [{}]}})
def test_any_configuration(answers: Answers, config: Any) -> None:
    body = json.dumps(config).encode()
    blob = Descriptor("application/vnd.oci.image.config.v1+json", digest_of(body), len(body))
    manifest = json.dumps({"config": blob.as_json(), "layers": []}).encode()
    answers.content = {"GET": (200, {}, manifest), blob.digest: (200, {}, body)}
    registry = answers.registry()
    used_or_refused(lambda: check_labels(find_image(registry, "cpu")))
