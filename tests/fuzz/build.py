"""What `buildkit` reads: references, the matrix, locks, registries' answers, inventories of images."""

import json
import os
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import trustme

from buildkit.certification.certificate import Certificate, Hardware, Part, read_statement, statement
from buildkit.certification.contributed import REQUIRED, Contributed, refuse_unproven
from buildkit.errors import BuildkitError
from buildkit.host.certificates import with_system_ca
from buildkit.host.settings import read_host, read_mirrors
from buildkit.images.plan import last_build
from buildkit.publishing.dsse import open_envelope, seal
from buildkit.publishing.inventory import MANIFEST, RELEASE, STATUS, read_inventory
from buildkit.recipe.lock import parse_lock
from buildkit.recipe.matrix import load_matrix
from buildkit.registry.credentials import read_credentials, token_in
from buildkit.registry.reference import parse_reference
from buildkit.supply.simple_index import local_offers
from tests.fuzz.damage import Target, octets, text, tree

ROOT = Path(__file__).parents[2]
REFERENCES = (
    "ghcr.io/team/slipway:cpu",
    "localhost:5000/a/b__c",
    "[::1]:5000/s@sha256:" + "0" * 64,
    "http://r.example/s",
)
LOCK = """# inputs: sha256:00ff
# epoch: 1790000000
# base: debian:12 sha256:00ff
# base-bytes: 100
# deb: libc6 2.36-9 sha256:00ff
# wheel: ray 100 60
# library: libfoo.so.1 ray
# architecture: sm_90 ray
# requires-python: ray >=3.10
# requires: ray click>=7.0 ; extra == "x"
ray==2.60.0 \\
    --hash=sha256:00ff
"""
MATRIX = (ROOT / "images" / "matrix.toml").read_text(encoding="utf-8")
TABLES = tomllib.loads(MATRIX)
FILES = {
    MANIFEST: '{"target": "cpu", "variant": "cpu", "pins": {"ray": "2.60.0"}, "env": [{"name": "A", "value": "1"}]}',
    RELEASE: 'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="x"\n',
    STATUS: "Package: libc6\nStatus: install ok installed\nVersion: 2.36\nArchitecture: amd64\n\n"
    "Package: zlib1g\nStatus: install ok installed\nVersion: 1:1.2\nArchitecture: amd64\nSource: zlib (1)\n",
    "opt/slipway/venv/lib/python3.11/site-packages/ray-2.60.0.dist-info/METADATA": "Metadata-Version: 2.1\n"
    "Name: ray\nVersion: 2.60.0\nLicense-Expression: Apache-2.0\n\ntext\n",
}

CERTIFICATE = statement(
    Certificate(
        "slipway:cuda", ("sha256:00ff",), "cuda", "v", "sha256:00ff", "00ff", "0.1.0", "2026-11-23T10:00:00Z", 400.0,
        False, Hardware("NVIDIA H200", 2, "580.65", 32, 256),
        tuple(Part(name, "passed", "", {"seconds": 1.0}) for name in REQUIRED),
    )
)  # fmt: skip
ENVELOPE = seal(CERTIFICATE, None).decode()


def files(random: Random) -> dict[str, bytes]:
    return {path: octets(random, [content]) for path, content in FILES.items() if random.random() < 0.95}


def toml(value: Any) -> str:
    """A value as TOML, with tables on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value if value is not None else "")


def matrix(random: Random) -> str:
    """Damaged text, or a damaged tree as valid TOML."""
    if random.random() < 0.2:
        return text(random, (MATRIX,))
    tables = tree(random, [TABLES])
    return (
        "".join(f"{json.dumps(key)} = {toml(entry)}\n" for key, entry in tables.items())
        if isinstance(tables, dict)
        else ""
    )


def read_matrix(content: str) -> object:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "images" / "matrix.toml"
        path.parent.mkdir()
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
        return load_matrix(Path(directory))


OURS = (BuildkitError,)


def show_certificate(document: Any) -> str:
    """Everything that `buildkit targets` does with a statement."""
    certificate = read_statement(json.dumps(document).encode())
    refuse_unproven(certificate)
    return (
        certificate.file_name
        + certificate.identifier
        + Contributed(Path(), certificate).summary
        + json.dumps(asdict(certificate))
    )


PIP = """[global]
index-url = https://me:secret@one.example/simple
extra-index-url =
  https://two.example
  file:///srv
cert = /a.pem
"""
UV = """index-url = "https://a.example"
find-links = ["/srv"]
[[index]]
url = "https://b.example"
default = true
[pip]
extra-index-url = ["https://c.example"]
"""
APT = "Types: deb\nURIs: http://deb.example/debian\nSuites: bookworm\nComponents: main\n"
DOCKER = {
    "auths": {"r.example": {"auth": "bWU6c2VjcmV0"}, "https://s.example/v1/": {"identitytoken": "t"}, "t.example": {}},
    "credHelpers": {"h.example": "fuzz"},
    "credsStore": "fuzz",
}
ANSWER = '{"ServerURL": "r.example", "Username": "me", "Secret": "secret"}'
PEM = trustme.CA().cert_pem.bytes().decode()
BUILT = '{"layers": {"base": "00ff"}, "lock": "00ff", "changes": ["tini 1 -> 2"]}'
PAGE = '<a href="../../files/some_thing-1.0-py3-none-any.whl#sha256=00ff">some_thing-1.0-py3-none-any.whl</a>'


def read_settings(name: str) -> Callable[[bytes], object]:
    """Reads this host's settings with one file of this content."""

    def read(content: bytes) -> object:
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            path = root / name
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
            host = read_host({}, root, root / "home")
            list(local_offers("some-thing", host))
            return host.build_environment("/ca.pem"), host.mirrored("https://a.example")

    return read


def read_index(content: bytes) -> object:
    """Reads a page of an index that is a folder."""
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory, "simple", "some-thing", "index.html")
        page.parent.mkdir(parents=True)
        page.write_bytes(content)
        return list(
            local_offers("some-thing", replace(read_host({}, Path(directory)), indexes=(f"file://{directory}/simple",)))
        )


def login(random: Random) -> tuple[bytes, bytes]:
    """docker's configuration, damaged as text or as a tree, and the answer of a credential helper."""
    damaged = json.dumps(tree(random, [DOCKER])) if random.random() < 0.7 else ""
    content = damaged.encode("utf-8", "surrogatepass") or octets(random, (json.dumps(DOCKER),))
    return content, octets(random, (ANSWER,))


def read_login(given: tuple[bytes, bytes]) -> object:
    """Looks up credentials as `buildkit publish` does, with a helper that gives this answer."""
    content, answer = given
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_bytes(content)
        Path(directory, "answer").write_bytes(answer)
        helper = Path(directory, "docker-credential-fuzz")
        helper.write_text(f"#!/bin/sh\nexec cat {directory}/answer\n")
        helper.chmod(0o755)
        with mock.patch.dict("os.environ", {"DOCKER_CONFIG": directory, "PATH": f"{directory}:{os.environ['PATH']}"}):
            return [read_credentials(host) for host in ("r.example", "h.example", "s.example")]


def read_file_with(read: Callable[[Path], object], name: str = "file") -> Callable[[bytes], object]:
    """A reader of files as a reader of their content."""

    def read_content(content: bytes) -> object:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            return read(path)

    return read_content


CPU = load_matrix(ROOT).variant("cpu")


TARGETS = (
    Target("references", lambda random: text(random, REFERENCES), parse_reference, OURS),
    Target("locks", lambda random: text(random, (LOCK,)), parse_lock, OURS),
    Target("matrix", matrix, read_matrix, OURS),
    Target("registry tokens", lambda random: octets(random, ('{"token": "abc", "expires_in": 60}',)), token_in, OURS),
    Target("image inventories", files, read_inventory, OURS),
    Target("certificates", lambda random: tree(random, [CERTIFICATE]), show_certificate, OURS),
    Target("envelopes", lambda random: octets(random, (ENVELOPE,)), open_envelope, OURS),
    Target("mirrors", lambda random: text(random, ("docker.io=https://m.example/x,ghcr.io=m2",)), read_mirrors, OURS),
    Target("pip's files", lambda random: octets(random, (PIP,)), read_settings("etc/pip.conf"), OURS),
    Target("uv's files", lambda random: octets(random, (UV,)), read_settings("home/.config/uv/uv.toml"), OURS),
    Target(
        "apt's files",
        lambda random: octets(random, (APT,)),
        read_settings("etc/apt/sources.list.d/debian.sources"),
        OURS,
    ),
    Target("docker's configuration", login, read_login, OURS),
    Target("certificate files", lambda random: octets(random, (PEM,)), read_file_with(with_system_ca), OURS),
    Target("pages of local indexes", lambda random: octets(random, (PAGE,)), read_index, OURS),
    Target(
        "records of builds",
        lambda random: octets(random, (BUILT,)),
        read_file_with(lambda path: last_build(CPU, path.parents[1]), f"builds/{CPU.target}-{CPU.name}.json"),
        OURS,
    ),
)
