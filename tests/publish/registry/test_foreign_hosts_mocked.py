"""A password goes to its own registry only. Registry and storage are small stand-ins."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from buildkit.errors import RegistryError
from buildkit.registry.client import Registry
from buildkit.registry.content import Descriptor, digest_of
from buildkit.registry.credentials import Credentials
from buildkit.registry.reference import Reference
from tests.publish.conftest import PASSWORD, USER
from tests.serving import serving

BASIC = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"
CONTENT = b"content"


class MockedHost(ThreadingHTTPServer):
    """A host that may ask for a password, and keeps the Authorization header of every request."""

    def __init__(self, challenge: str = "") -> None:
        super().__init__(("127.0.0.1", 0), MockedHandler)
        self.challenge, self.elsewhere = challenge, ""
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}  # by path, in place of the usual ones
        self.seen: list[str | None] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class MockedHandler(BaseHTTPRequestHandler):
    server: MockedHost

    def do_POST(self) -> None:
        self.answer(202, Location=f"http://{self.server.elsewhere}/upload")

    def do_GET(self) -> None:
        self.answer(307, Location=f"http://{self.server.elsewhere}/blob") if self.server.elsewhere else self.answer(200)

    def do_HEAD(self) -> None:
        self.answer(404)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(201)

    def answer(self, status: int, **headers: str) -> None:
        authorization = self.headers.get("Authorization")
        self.server.seen.append(authorization)
        if self.server.challenge and authorization != BASIC:
            status, headers = 401, {"WWW-Authenticate": self.server.challenge}
        body = CONTENT if status == 200 else b""
        if self.path in self.server.answers:
            status, headers, body = self.server.answers[self.path]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hosts() -> Iterator[tuple[MockedHost, MockedHost]]:
    """A registry that wants the password, and the storage to which it sends its callers."""
    with serving(MockedHost('Basic realm="r"')) as registry, serving(MockedHost()) as storage:
        registry.elsewhere = storage.address
        yield registry, storage


def connect_to(host: MockedHost) -> Registry:
    reference = Reference(host.address, "slipway", secure=False)
    return Registry(reference, Credentials(USER, PASSWORD), patience=0.1)


def test_mocked_storage_receives_an_upload_without_the_password(hosts: tuple[MockedHost, MockedHost]) -> None:
    registry, storage = hosts
    connect_to(registry).put_blob(CONTENT, "text/plain")
    assert BASIC in registry.seen
    assert storage.seen == [None]


def test_mocked_storage_serves_a_blob_without_the_password(hosts: tuple[MockedHost, MockedHost]) -> None:
    registry, storage = hosts
    assert connect_to(registry).blob(Descriptor("text/plain", digest_of(CONTENT), len(CONTENT))) == CONTENT
    assert BASIC in registry.seen
    assert storage.seen == [None]


def test_mocked_storage_that_asks_for_the_password_gets_none(hosts: tuple[MockedHost, MockedHost]) -> None:
    """The password goes neither to the storage nor to a token server that it names."""
    registry, storage = hosts
    storage.challenge = f'Bearer realm="http://{storage.address}/token",service="s"'
    with pytest.raises(RegistryError, match=r"refuses PUT .*HTTP 401"):
        connect_to(registry).put_blob(CONTENT, "text/plain")
    assert set(storage.seen) == {None}


def test_mocked_redirect_to_the_registry_itself_cannot_name_another_token_server(
    hosts: tuple[MockedHost, MockedHost],
) -> None:
    """Somebody who controls one path of the host must not get the password through its 401."""
    registry, storage = hosts
    registry.challenge = ""
    evil = {"WWW-Authenticate": f'Bearer realm="http://{storage.address}/token",service="s"'}
    registry.answers = {
        "/v2/slipway/manifests/latest": (307, {"Location": "/pages/evil"}, b""),
        "/pages/evil": (401, evil, b""),
    }
    with pytest.raises(RegistryError, match="HTTP 401"):
        connect_to(registry).manifest("latest")
    assert storage.seen == []


def test_mocked_token_server_that_redirects_hands_on_no_password(hosts: tuple[MockedHost, MockedHost]) -> None:
    registry, storage = hosts
    registry.challenge = f'Bearer realm="http://{registry.address}/token",service="s"'
    registry.answers = {"/token": (307, {"Location": f"http://{storage.address}/token"}, b"")}
    reference = Reference(registry.address, "slipway", secure=False)
    with pytest.raises(RegistryError, match="gave no token"):
        Registry(reference, Credentials(identity_token="secret"), patience=0.1).check_access()
    assert storage.seen == []


def test_mocked_upload_without_a_location_is_named(hosts: tuple[MockedHost, MockedHost]) -> None:
    registry, _ = hosts
    registry.answers = {"/v2/slipway/blobs/uploads/": (202, {}, b"")}
    with pytest.raises(RegistryError, match="an upload without a Location"):
        connect_to(registry).put_blob(CONTENT, "text/plain")


def page_of(number: int) -> bytes:
    entry = {"mediaType": "a", "digest": f"sha256:{number:064x}", "size": 1}
    return json.dumps({"manifests": [entry]}).encode()


def test_mocked_referrers_on_several_pages_are_all_read(hosts: tuple[MockedHost, MockedHost]) -> None:
    registry, _ = hosts
    first = "/v2/slipway/referrers/sha256:1"
    registry.challenge = ""
    registry.answers = {
        first: (200, {"Link": f'<{first}?next=2>; rel="next"'}, page_of(1)),
        f"{first}?next=2": (200, {}, page_of(2)),
    }
    referrers = connect_to(registry).referrers("sha256:1")
    assert [entry.digest for entry in referrers] == [f"sha256:{number:064x}" for number in (1, 2)]


def test_mocked_referrers_that_never_end_are_refused(hosts: tuple[MockedHost, MockedHost]) -> None:
    registry, _ = hosts
    path = "/v2/slipway/referrers/sha256:1"
    registry.challenge = ""
    registry.answers = {path: (200, {"Link": f'<{path}>; rel="next"'}, page_of(1))}
    with pytest.raises(RegistryError, match="more than 100 pages"):
        connect_to(registry).referrers("sha256:1")


@pytest.mark.parametrize("path", ["referrers/sha256:1", "manifests/latest"])
def test_mocked_answer_above_the_limit_is_refused(hosts: tuple[MockedHost, MockedHost], path: str) -> None:
    registry, _ = hosts
    registry.challenge = ""
    registry.answers = {f"/v2/slipway/{path}": (200, {}, b" " * (2**22 + 1))}
    asked = connect_to(registry)
    with pytest.raises(RegistryError, match="more than 4194304 bytes"):
        asked.manifest("latest") if "manifests" in path else asked.referrers("sha256:1")
