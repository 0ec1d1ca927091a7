"""Images that differ in times only get one digest: what `docker save` wrote is rewritten with fixed times."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from buildkit.images.archive import ImageArchive, fix_times
from buildkit.registry.compression import COMPRESSIONS, tar_of

EPOCH = 1795392000
Files = dict[str, tuple[bytes, int]]  # name: content and time


def add(archive: tarfile.TarFile, name: str, content: bytes, mtime: float = 0, **attributes: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), mtime
    for key, value in attributes.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(content))


def layer_of(files: Files, **attributes: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for name, (content, mtime) in files.items():
            add(layer, name, content, mtime, **attributes)
    return buffer.getvalue()


def saved(path: Path, *layers: bytes, **config: Any) -> Path:
    """The archive of an image, as `docker save` writes it."""
    names = [f"blobs/{number}" for number in range(len(layers))]
    described = {"os": "linux", "created": "2026-01-01T00:00:00Z", "history": [], **config}
    with tarfile.open(path, "w") as archive:
        for name, layer in zip(names, layers, strict=True):
            add(archive, name, layer)
        add(archive, "config", json.dumps(described).encode())
        add(archive, "manifest.json", json.dumps([{"Config": "config", "Layers": names}]).encode())
    return path


def fix(folder: Path, name: str, *layers: bytes, compression: str = "zstd", **config: Any) -> ImageArchive:
    into = folder / name
    into.mkdir()
    return fix_times(saved(into / "saved.tar", *layers, **config), into, EPOCH, COMPRESSIONS[compression])


FILES: Files = {"a.py": (b"a", 1), "b.pyc": (b"b", 2)}


def test_times_of_files_and_history_and_the_engines_own_notes_are_no_difference(tmp_path: Path) -> None:
    first = fix(tmp_path, "1", layer_of(FILES), history=[{"created": "2026-01-01T00:00:00Z", "created_by": "x"}])
    later: Files = {name: (content, 10**9 + time) for name, (content, time) in FILES.items()}
    second = fix(
        tmp_path,
        "2",
        layer_of(later, uname="me", gname="us", pax_headers={"mtime": "1000000001.5", "atime": "3"}),
        created="2027-01-01T00:00:00Z",
        history=[{"created": "2027-01-01T00:00:00Z", "created_by": "x"}],
        container="0123",
        docker_version="26",
    )
    assert (first.digest, first.image_id) == (second.digest, second.image_id)


@pytest.mark.parametrize(
    "attributes",
    [{"mode": 0o755}, {"uid": 7}, {"pax_headers": {"SCHILY.xattr.security.capability": "x"}}],
)
def test_everything_else_is_a_difference(tmp_path: Path, attributes: dict[str, Any]) -> None:
    changed = layer_of(FILES, **attributes)
    assert fix(tmp_path, "1", layer_of(FILES)).image_id != fix(tmp_path, "2", changed).image_id


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_layers_that_the_engine_keeps_compressed_give_the_same_image(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    plain, packed = fix(tmp_path, "1", layer_of(FILES)), fix(tmp_path, "2", pack(layer_of(FILES)))
    assert plain.digest == packed.digest


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_manifest_describes_the_files_that_are_pushed(tmp_path: Path, compression: str) -> None:
    archive = fix(tmp_path, "1", layer_of(FILES), layer_of({"c": (b"c", 3)}), compression=compression)
    manifest = json.loads(archive.manifest)
    assert [layer["size"] for layer in manifest["layers"]] == [layer.path.stat().st_size for layer in archive.layers]
    assert {layer["mediaType"].rpartition("+")[2] for layer in manifest["layers"]} == {compression.partition("-")[0]}
    assert manifest["config"]["digest"] == archive.image_id
    with archive.layer_file(2) as file, tarfile.open(fileobj=tar_of(file), mode="r|") as layer:
        assert [(member.name, member.mtime) for member in layer] == [("c", EPOCH)]


def test_compression_changes_no_image_id(tmp_path: Path) -> None:
    zstd, packed = fix(tmp_path, "1", layer_of(FILES)), fix(tmp_path, "2", layer_of(FILES), compression="gzip")
    assert zstd.image_id == packed.image_id
    assert zstd.digest != packed.digest
