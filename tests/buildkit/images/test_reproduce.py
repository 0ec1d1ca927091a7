"""Two image archives are compared file by file until the first difference."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from buildkit.images.reproduce import OciLayout, find_difference

Files = dict[str, tuple[bytes, int]]  # name: content and time


def add(archive: tarfile.TarFile, name: str, content: bytes, mtime: int = 0) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), mtime
    archive.addfile(member, io.BytesIO(content))


def layout(path: Path, *layers: Files, config: str = "same") -> OciLayout:
    """An OCI image layout whose layers hold the given files."""
    blobs: list[bytes] = []
    for files in layers:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as layer:
            for name, (content, mtime) in files.items():
                add(layer, name, content, mtime)
        blobs.append(buffer.getvalue())
    blobs.append(json.dumps({"config": config}).encode())
    digests = ["sha256:" + hashlib.sha256(blob).hexdigest() for blob in blobs]
    described = [{"digest": digest} for digest in digests]
    manifest = json.dumps({"layers": described[:-1], "config": described[-1]}).encode()
    digest = "sha256:" + hashlib.sha256(manifest).hexdigest()
    with tarfile.open(path, "w") as archive:
        add(archive, "index.json", json.dumps({"manifests": [{"digest": digest}]}).encode())
        for name, blob in zip([*digests, digest], [*blobs, manifest], strict=True):
            add(archive, f"blobs/{name.replace(':', '/')}", blob)
    return OciLayout(path)


BASE: Files = {"etc/os-release": (b"debian", 1)}
WHEELS: Files = {"a.py": (b"a", 1), "b.pyc": (b"b", 1)}


def test_equal_builds_have_equal_digests(tmp_path: Path) -> None:
    one, other = layout(tmp_path / "1", BASE, WHEELS), layout(tmp_path / "2", BASE, WHEELS)
    assert one.digest == other.digest


@pytest.mark.parametrize(
    ("changed", "words"),
    [((b"c", 1), "1 bytes"), ((b"b", 2), "time 2"), (None, "absent")],
)
def test_the_first_file_that_differs_is_named(tmp_path: Path, changed: tuple[bytes, int] | None, words: str) -> None:
    wheels = {name: value for name, value in {**WHEELS, "b.pyc": changed}.items() if value}
    difference = find_difference(layout(tmp_path / "1", BASE, WHEELS), layout(tmp_path / "2", BASE, wheels))
    assert (difference.layer, difference.file) == (2, "b.pyc")
    assert words in difference.second


def test_a_different_configuration_is_named(tmp_path: Path) -> None:
    one, other = layout(tmp_path / "1", BASE), layout(tmp_path / "2", BASE, config="another")
    difference = find_difference(one, other)
    assert difference.file == "config in the image's configuration"
    assert (difference.first, difference.second) == ("same", "another")
