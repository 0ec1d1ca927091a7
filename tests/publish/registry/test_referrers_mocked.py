"""The referrers API of OCI 1.1. Debian's docker-registry lacks it, so the registry here is a small stand-in."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from buildkit.registry.client import Registry
from buildkit.registry.content import IMAGE, INDEX, digest_of
from buildkit.registry.credentials import Credentials
from buildkit.registry.reference import Reference
from tests.publish.conftest import push_image
from tests.serving import serving


class MockedRegistry(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), MockedHandler)
        self.content: dict[str, tuple[str, bytes]] = {}
        self.put_tags: list[str] = []


class MockedHandler(BaseHTTPRequestHandler):
    server: MockedRegistry

    def answer(self, status: int, body: bytes = b"", kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        resource, name = self.path.rsplit("/", 2)[1:]
        if resource == "referrers":
            entries = [
                {"mediaType": IMAGE, "digest": key, "size": len(body), "artifactType": json.loads(body)["artifactType"]}
                for key, (kind, body) in self.server.content.items()
                if kind == IMAGE
                and key.startswith("sha256:")
                and json.loads(body).get("subject", {}).get("digest") == name
            ]
            self.answer(200, json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode(), INDEX)
        elif name in self.server.content:
            kind, body = self.server.content[name]
            self.answer(200, body, kind)
        else:
            self.answer(404)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        self.answer(202, Location=f"{self.path}place")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind, name = self.headers["Content-Type"], self.path.rsplit("/", 1)[-1]
        self.server.content[digest_of(body)] = (kind, body)
        if "/manifests/" in self.path:
            self.server.content[name] = (kind, body)
            self.server.put_tags.append(name)
            subject = json.loads(body).get("subject")
            self.answer(201, **({"OCI_Subject": subject["digest"]} if subject else {}))
        else:
            self.answer(201)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[MockedRegistry]:
    with serving(MockedRegistry()) as server:
        yield server


def test_mocked_referrers_api_makes_the_fallback_tag_unnecessary(server: MockedRegistry) -> None:
    reference = Reference(f"127.0.0.1:{server.server_port}", "slipway", secure=False)
    registry = Registry(reference, Credentials(), patience=1)
    digest = push_image(registry, "latest")
    image = registry.manifest("latest")
    assert image
    artifact = registry.attach(image.descriptor, "text/vnd.test", b"one", {})
    assert [entry.digest for entry in registry.referrers(digest)] == [artifact.digest]
    assert registry.referrers(digest)[0].artifact_type == "text/vnd.test"
    assert digest.replace(":", "-") not in server.put_tags
