"""Ordinary engines pull and run an image whose layers are zstd:chunked. Registry, engines and image are real.

The image holds one program of this host and its libraries.
"""

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from buildkit.images.archive import CONFIG, fix_times
from buildkit.registry.client import Registry
from buildkit.registry.compression import COMPRESSIONS
from buildkit.registry.content import IMAGE
from buildkit.registry.credentials import Credentials
from buildkit.registry.reference import Reference
from tests.buildkit.images.test_archive import EPOCH, add, saved
from tests.engines.conftest import Setting
from tests.publish.conftest import Server

pytestmark = pytest.mark.timeout(300)

TEXT = b"read in the container\n"


def layers() -> tuple[bytes, bytes]:
    """`cat` and what it links, and a text."""
    program = shutil.which("cat")
    assert program
    linked = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    files = {name: Path(name).read_bytes() for name in (program, *re.findall(r"/\S+", linked))}
    return packed(files), packed({"/etc/text": TEXT})


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for name, content in files.items():
            add(layer, name.lstrip("/"), content, mode=0o755)
    return buffer.getvalue()


@pytest.mark.parametrize("compression", ["zstd-lazy", "zstd-partial"])
def test_engine_pulls_and_runs_an_image_of_chunked_layers(
    setting: Setting, server: Server, tmp_path: Path, compression: str
) -> None:
    config = {"architecture": "amd64", "config": {"Cmd": ["cat", "/etc/text"], "Env": ["PATH=/usr/bin:/bin"]}}
    archive = fix_times(saved(tmp_path / "saved.tar", *layers(), **config), tmp_path, EPOCH, COMPRESSIONS[compression])
    registry = Registry(Reference(server.host, "lazy", secure=False), Credentials())
    for layer in archive.layers:
        registry.put_file(layer.path, layer.blob)
    registry.put_blob(archive.config, CONFIG)
    registry.put_manifest(compression, archive.manifest, IMAGE)

    plain = ("--tls-verify=false",) if setting.engine == "podman" else ()
    name = f"{server.host}/lazy:{compression}"
    pulled = setting.call(setting.engine, "pull", *plain, name)
    assert pulled.returncode == 0, pulled.stderr
    try:
        ran = setting.call(setting.engine, "run", "--rm", "--network", "none", name)
        assert ran.stdout.encode() == TEXT, ran.stderr
    finally:
        setting.call(setting.engine, "rmi", name)
