"""What `buildkit` reads: references, the matrix, locks, registries' answers, inventories of images."""

import json
import tempfile
import tomllib
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from buildkit.certification.certificate import Certificate, Hardware, Part, read_statement, statement
from buildkit.certification.contributed import REQUIRED, Contributed, refuse_unproven
from buildkit.errors import BuildkitError
from buildkit.host.settings import read_mirrors
from buildkit.publishing.dsse import open_envelope, seal
from buildkit.publishing.inventory import MANIFEST, RELEASE, STATUS, read_inventory
from buildkit.recipe.lock import parse_lock
from buildkit.recipe.matrix import load_matrix
from buildkit.registry.credentials import token_in
from buildkit.registry.reference import parse_reference
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


def toml(found: Any) -> str:
    """A value as TOML, with tables on one line."""
    if isinstance(found, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(one)}" for key, one in found.items()) + "}"
    if isinstance(found, list):
        return "[" + ", ".join(map(toml, found)) + "]"
    return str(found) if isinstance(found, float) else json.dumps(found if found is not None else "")


def matrix(random: Random) -> str:
    """Damaged text, or a damaged tree as valid TOML."""
    if random.random() < 0.2:
        return text(random, (MATRIX,))
    found = tree(random, [TABLES])
    return (
        "".join(f"{json.dumps(key)} = {toml(one)}\n" for key, one in found.items()) if isinstance(found, dict) else ""
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
    found = read_statement(json.dumps(document).encode())
    refuse_unproven(found)
    return found.file_name + found.identifier + Contributed(Path(), found).summary + json.dumps(asdict(found))


TARGETS = (
    Target("references", lambda random: text(random, REFERENCES), parse_reference, OURS),
    Target("locks", lambda random: text(random, (LOCK,)), parse_lock, OURS),
    Target("matrix", matrix, read_matrix, OURS),
    Target("registry tokens", lambda random: octets(random, ('{"token": "abc", "expires_in": 60}',)), token_in, OURS),
    Target("image inventories", files, read_inventory, OURS),
    Target("certificates", lambda random: tree(random, [CERTIFICATE]), show_certificate, OURS),
    Target("envelopes", lambda random: octets(random, (ENVELOPE,)), open_envelope, OURS),
    Target("mirrors", lambda random: text(random, ("docker.io=https://m.example/x,ghcr.io=m2",)), read_mirrors, OURS),
)
