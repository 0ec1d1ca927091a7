"""A real registry (Debian's docker-registry) with TLS and a password, and small hand-made images."""

import base64
import gzip
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from buildkit.publishing.check import PublishedImage
from buildkit.publishing.provenance import BuildRecord
from buildkit.publishing.release import Publication, Tags, choose_tags, promote, read_staged, sign_staged
from buildkit.recipe.lock import Lock, parse_lock
from buildkit.registry.client import Registry
from buildkit.registry.content import IMAGE, digest_of
from buildkit.registry.credentials import Credentials
from buildkit.registry.reference import Reference
from buildkit.registry.signature import Signer, Trust
from tests.serving import free_port

ROOT = Path(__file__).parents[2]
USER, PASSWORD = "publisher", "correct horse"
PASSWORD_HASH = "$2b$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2"  # bcrypt, of PASSWORD
STARTUP = 20.0  # seconds

LOCK = parse_lock(f"""# Lock of cpu-small.
# deb: tini 0.19.0-1 sha256:{"4" * 64}
# deb: libstdc++6 1 sha256:{"5" * 64}
torch==2.13.0+cpu \\
    --hash=sha256:{"1" * 64}
typing-extensions==4.16.0 \\
    --hash=sha256:{"2" * 64} \\
    --hash=sha256:{"3" * 64}
""")
LOCK_DIGEST = "sha256:" + "a" * 64
REVISION = "b" * 40
STATUS = """Package: libstdc++6
Status: install ok installed
Architecture: amd64
Source: gcc-12 (12.2.0-14+deb12u1)
Version: 12.2.0-14+deb12u1
Description: GNU Standard C++ Library v3
 Package: not-a-field

Package: tini
Status: hold ok installed
Architecture: amd64
Version: 0.19.0-1

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""
SITE = "opt/slipway/venv/lib/python3.11/site-packages"


@pytest.fixture(scope="session", autouse=True)
def programs() -> Iterator[None]:
    """Puts build/tools/bin with cosign and docker-registry on PATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{ROOT / 'build/tools/bin'}:{os.environ['PATH']}")
        if missing := [name for name in ("cosign", "docker-registry") if not shutil.which(name)]:
            pytest.fail(f"{' and '.join(missing)} not installed: run ci/tools", pytrace=False)
        yield


# ---- the registry ----------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A docker-registry process that can be stopped, killed, frozen and started again on the same port and storage."""

    folder: Path
    port: int
    ca: Path
    extra: dict[str, Any]
    wrapper: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    def stored_bytes(self) -> int:
        """Bytes received so far, read while the registry moves and deletes its upload folders."""
        size = 0
        for folder, _, names in os.walk(self.storage):  # skips folders that vanish meanwhile
            with suppress(FileNotFoundError):
                size += sum(Path(folder, name).stat().st_size for name in names if name == "data")
        return size

    def start(self) -> None:
        config = {
            "version": "0.1",
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(self.storage)}},
            "http": {
                "addr": self.host,
                "tls": {"certificate": str(self.folder / "server.pem"), "key": str(self.folder / "server.key")},
            },
            **self.extra,
        }
        path = self.folder / "config.yml"
        path.write_text(json.dumps(config))  # JSON is YAML
        log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(
            [*self.wrapper, "docker-registry", "serve", str(path)], stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        self.wait()

    def wait(self) -> None:
        assert self.process
        end = time.monotonic() + STARTUP
        while time.monotonic() < end and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        pytest.fail(f"docker-registry did not start: {(self.folder / 'log').read_text()[-2000:]}")

    def signal(self, number: int) -> None:
        assert self.process
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        if self.process and self.process.poll() is None:
            self.signal(signal.SIGKILL)
        if self.process:
            self.process.wait()

    def blob_path(self, digest: str) -> Path:
        value = digest.removeprefix("sha256:")
        return self.storage / "docker/registry/v2/blobs/sha256" / value[:2] / value / "data"

    def tags(self, repository: str) -> set[str]:
        folder = self.storage / "docker/registry/v2/repositories" / repository / "_manifests/tags"
        return {path.parent.parent.name for path in folder.glob("*/current/link")}


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


def make_server(
    folder: Path, authority: trustme.CA, extra: dict[str, Any] | None = None, wrapper: tuple[str, ...] = ()
) -> Server:
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    (folder / "server.key").write_bytes(certificate.private_key_pem.bytes())
    (folder / "server.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "htpasswd").write_text(f"{USER}:{PASSWORD_HASH}\n")
    (folder / "storage").mkdir()
    password = {"auth": {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}}
    return Server(folder, free_port(), folder / "ca.pem", password if extra is None else extra, wrapper)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator[Server]:
    """A server for tests that leave it intact; each has its own repository."""
    server = make_server(tmp_path_factory.mktemp("registry"), authority)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_server(tmp_path: Path, authority: trustme.CA) -> Iterator[Server]:
    """A server for one test that kills, freezes or damages it."""
    folder = tmp_path / "registry"
    folder.mkdir()
    server = make_server(folder, authority)
    server.start()
    yield server
    server.kill()


def docker_config(folder: Path, host: str, password: str = PASSWORD) -> Path:
    """A folder with the configuration that `docker login` writes."""
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return folder


def connect(server: Server, repository: str, patience: float = 10.0, password: str = PASSWORD) -> Registry:
    reference = Reference(server.host, repository)
    return Registry(reference, Credentials(USER, password), server.ca, patience)


@pytest.fixture
def registry(shared_server: Server, request: pytest.FixtureRequest) -> Registry:
    """The test's own repository in the shared registry."""
    return connect(shared_server, f"test/{request.node.name.split('[')[0].replace('_', '-')}")


# ---- images ----------------------------------------------------------------------------------------------------------


def make_layer(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(buffer.getvalue(), mtime=0)


def wheel_metadata(name: str, version: str, *lines: str) -> dict[str, str]:
    text = "\n".join(["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *lines, "", "Words."])
    return {f"{SITE}/{name.replace('-', '_')}-{version}.dist-info/METADATA": text}


def image_json(lock: str = LOCK_DIGEST) -> dict[str, Any]:
    base = {"name": "debian12", "provider": "bootstrap"}
    return {"target": "cpu", "variant": "small", "version": "0.1.0", "lock": lock, "base": base}


def base_layers() -> list[dict[str, str]]:
    """The files of three layers: a base, wheels, and a layer that deletes a wheel and adds the image's manifest."""
    return [
        {
            "usr/lib/os-release": 'PRETTY_NAME="Debian GNU/Linux 12"\nID=debian\nVERSION_ID="12"\n',
            "var/lib/dpkg/status": STATUS,
        },
        {
            **wheel_metadata("torch", "2.13.0+cpu", "License-Expression: BSD-3-Clause AND Apache-2.0"),
            **wheel_metadata("six", "1.17.0", "License: MIT"),
        },
        {
            **wheel_metadata("Typing_Extensions", "4.16.0", "License: see LICENSE"),
            f"{SITE}/.wh.six-1.17.0.dist-info": "",
            "etc/slipway/image.json": json.dumps(image_json()),
        },
    ]


LABELS = {
    "org.opencontainers.image.title": "slipway cpu-small",
    "org.opencontainers.image.version": "0.1.0",
    "org.opencontainers.image.revision": REVISION,
    "org.opencontainers.image.created": "2026-11-21T10:00:00+00:00",
    "org.opencontainers.image.base.name": "debian:bookworm-slim",
    "dev.slipway.target": "cpu",
    "dev.slipway.variant": "small",
    "dev.slipway.lock": LOCK_DIGEST,
}


def push_image(
    registry: Registry, tag: str, layers: list[dict[str, str]] | None = None, labels: dict[str, str] | None = None
) -> str:
    """The digest of an image that is made of these layers and pushed."""
    contents = [make_layer(files) for files in layers or base_layers()]
    blobs = [registry.put_blob(content, "application/vnd.oci.image.layer.v1.tar+gzip") for content in contents]
    diff_ids = [digest_of(gzip.decompress(content)) for content in contents]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": labels or LABELS},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    config_blob = registry.put_blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json")
    manifest = {
        "schemaVersion": 2,
        "mediaType": IMAGE,
        "config": config_blob.as_json(),
        "layers": [blob.as_json() for blob in blobs],
    }
    registry.put_manifest(tag, json.dumps(manifest).encode(), IMAGE)
    pushed = registry.manifest(tag)
    assert pushed
    return pushed.descriptor.digest


@pytest.fixture
def record() -> BuildRecord:
    return BuildRecord(
        target="cpu",
        variant="small",
        version="0.1.0",
        revision=REVISION,
        lock=LOCK_DIGEST,
        lock_path="images/locks/cpu/small.txt",
        base="debian12",
        base_provider="bootstrap",
        base_digest="",
        source_date=1795255200,
        started="2026-11-21T10:00:00Z",
        finished="2026-11-21T10:05:00Z",
    )


def tags_of(digest: str) -> Tags:
    return choose_tags("cpu", "small", True, "0.1.0", LOCK_DIGEST, digest)


def stage(registry: Registry) -> tuple[PublishedImage, Tags]:
    """An image under its staging tag, read back."""
    digest = push_image(registry, "first")
    tags = replace(tags_of(digest), staging="first")
    return read_staged(registry, tags), tags


def release(
    registry: Registry,
    image: PublishedImage,
    tags: Tags,
    record: BuildRecord,
    lock: Lock,
    signer: Signer,
    ca: Path | None,
) -> Publication:
    """A release of one image."""
    return promote(registry, sign_staged(registry, image, tags, record, lock, signer, ca))


# ---- signing ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory, programs: None) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    subprocess.run(
        ["cosign", "generate-key-pair"],
        cwd=folder,
        env={**os.environ, "COSIGN_PASSWORD": ""},
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture
def signer(keys: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    return Signer(str(keys / "cosign.key"))


@pytest.fixture
def trust(keys: Path) -> Trust:
    return Trust(key=str(keys / "cosign.pub"))


@pytest.fixture
def login(shared_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores the password where docker and cosign read it."""
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(folder, shared_server.host)))


@pytest.fixture
def own_login(own_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(folder, own_server.host)))


@pytest.fixture
def released(own_server: Server, own_login: None, record: BuildRecord, signer: Signer) -> tuple[Registry, Tags]:
    registry = connect(own_server, "slipway", patience=1)
    image, tags = stage(registry)
    release(registry, image, tags, record, LOCK, signer, own_server.ca)
    return registry, tags
