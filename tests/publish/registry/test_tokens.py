"""Token authentication, as in most public registries: docker-registry trusts a token server in this process."""

import base64
import json
import socket
import ssl
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

from buildkit.errors import RegistryError
from buildkit.registry.client import Registry
from buildkit.registry.credentials import Credentials
from buildkit.registry.reference import Reference
from tests.publish.conftest import PASSWORD, USER, Server, connect, make_server, push_image
from tests.serving import serving

SERVICE, ISSUER = "test registry", "test issuer"


def encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


class TokenServer(ThreadingHTTPServer):
    """Exchanges the password for a token of the requested scope (https://distribution.github.io/distribution/spec/auth/jwt/)."""

    def __init__(self, authority: trustme.CA) -> None:
        super().__init__(("127.0.0.1", 0), TokenHandler)
        certificate = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(context)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
        self.chain = [
            base64.b64encode(load_pem_x509_certificate(pem.bytes()).public_bytes(Encoding.DER)).decode()
            for pem in certificate.cert_chain_pems
        ]
        self.scopes: list[str] = []

    def token(self, scope: str) -> str:
        kind, name, actions = scope.split(":")
        now = int(time.time())
        claims = {"iss": ISSUER, "sub": USER, "aud": SERVICE, "exp": now + 300, "nbf": now - 10, "iat": now, "jti": "1"}
        access = [{"type": kind, "name": name, "actions": actions.split(",")}]
        parts = [{"typ": "JWT", "alg": "ES256", "x5c": self.chain}, {**claims, "access": access}]
        signed = ".".join(encode(json.dumps(part).encode()) for part in parts)
        assert isinstance(self.key, ec.EllipticCurvePrivateKey)
        r, s = utils.decode_dss_signature(self.key.sign(signed.encode(), ec.ECDSA(SHA256())))
        return f"{signed}.{encode(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


class TokenHandler(BaseHTTPRequestHandler):
    server: TokenServer

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        expected = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        allowed = self.headers.get("Authorization") == f"Basic {expected}" and query["service"] == [SERVICE]
        self.send_response(200 if allowed else 401)
        self.end_headers()
        if allowed:
            self.server.scopes.append(query["scope"][0])
            self.wfile.write(json.dumps({"token": self.server.token(query["scope"][0])}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def token_server(authority: trustme.CA) -> Iterator[TokenServer]:
    with serving(TokenServer(authority)) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path, authority: trustme.CA, token_server: TokenServer) -> Iterator[Server]:
    authority.cert_pem.write_to_path(str(tmp_path / "roots.pem"))
    realm = f"https://127.0.0.1:{token_server.server_port}/token"
    token = {"realm": realm, "service": SERVICE, "issuer": ISSUER, "rootcertbundle": str(tmp_path / "roots.pem")}
    server = make_server(tmp_path, authority, {"auth": {"token": token}})
    server.start()
    yield server
    server.kill()


def test_token_has_the_requested_scope(server: Server, token_server: TokenServer) -> None:
    registry = connect(server, "team/slipway")
    digest = push_image(registry, "latest")
    manifest = registry.manifest("latest")
    assert manifest
    assert manifest.descriptor.digest == digest
    assert {scope.rpartition(":")[0] for scope in token_server.scopes} == {"repository:team/slipway"}
    assert any("push" in scope for scope in token_server.scopes)


def test_token_server_that_refuses_is_named(server: Server) -> None:
    registry = connect(server, "team/slipway", password="wrong")
    with pytest.raises(RegistryError, match=r"gave no token for .*HTTP 401"):
        registry.check_access()


def test_password_is_not_sent_to_a_token_server_without_https(tmp_path: Path, authority: trustme.CA) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "roots.pem"))
    token = {"service": SERVICE, "issuer": ISSUER, "rootcertbundle": str(tmp_path / "roots.pem")}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        realm = f"http://127.0.0.1:{listener.getsockname()[1]}/token"
        server = make_server(tmp_path, authority, {"auth": {"token": {**token, "realm": realm}}})
        server.start()
        try:
            with pytest.raises(RegistryError, match=r"the password to http://.* is not HTTPS"):
                connect(server, "team/slipway", patience=0.1).check_access()
        finally:
            server.kill()
        with pytest.raises(BlockingIOError):  # nothing connected
            listener.accept()


# ---- TLS is never given up -------------------------------------------------------------------------------------------


class MockedTlsRegistry(ThreadingHTTPServer):
    """Answers every request with a status and headers, over TLS."""

    def __init__(self, authority: trustme.CA, status: int, headers: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), MockedTlsHandler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.status, self.headers = status, headers


class MockedTlsHandler(BaseHTTPRequestHandler):
    server: MockedTlsRegistry

    def answer(self) -> None:
        self.send_response(404 if self.command == "HEAD" else self.server.status)
        for name, value in {"Content-Length": "0", **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()

    do_GET = do_POST = do_HEAD = answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(("status", "work"), [(202, "put_blob"), (307, "manifest")])
def test_mocked_registry_with_tls_cannot_send_us_to_an_address_without(
    authority: trustme.CA, tmp_path: Path, status: int, work: str
) -> None:
    """An upload's Location, or a redirect, on the same host: content and password would cross the network in clear."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        plain = f"http://127.0.0.1:{listener.getsockname()[1]}/place"
        with serving(MockedTlsRegistry(authority, status, {"Location": plain})) as server:
            reference = Reference(f"127.0.0.1:{server.server_port}", "slipway")
            registry = Registry(reference, Credentials(USER, PASSWORD), tmp_path / "ca.pem", patience=0.1)
            with pytest.raises(RegistryError, match=r"sends us to http://.* is not HTTPS"):
                registry.manifest("latest") if work == "manifest" else registry.put_blob(b"content", "text/plain")
        with pytest.raises(BlockingIOError):  # nothing connected
            listener.accept()


def test_token_server_of_a_plain_registry_is_verified(tmp_path: Path, token_server: TokenServer) -> None:
    """Its certificate is of an authority that this host does not trust: it gets no password."""
    challenge = f'Bearer realm="https://127.0.0.1:{token_server.server_port}/token",service="{SERVICE}"'

    class Plain(MockedTlsRegistry):
        def __init__(self) -> None:
            ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), MockedTlsHandler)
            self.status, self.headers = 401, {"WWW-Authenticate": challenge}

    with serving(Plain()) as server:
        reference = Reference(f"127.0.0.1:{server.server_port}", "slipway", secure=False)
        registry = Registry(reference, Credentials(USER, PASSWORD), patience=0.1)
        with pytest.raises(RegistryError, match="no certificate that this host trusts"):
            registry.manifest("latest")
    assert token_server.scopes == []
