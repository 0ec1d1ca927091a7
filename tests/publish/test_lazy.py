"""Images with zstd:chunked layers in a real registry: a table of contents is read back, and another one is refused."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard

from buildkit.errors import RegistryError, TrustError
from buildkit.images.archive import CONFIG
from buildkit.publishing.check import PublishedImage, check_existence, find_image, read_layers
from buildkit.registry.client import Registry
from buildkit.registry.content import IMAGE, digest_of
from tests.buildkit.images.test_archive import fix
from tests.publish.conftest import base_layers, make_layer

STARGZ = "containerd.io/snapshot/stargz/toc.digest"
CHECKSUM = "io.github.containers.zstd-chunked.manifest-checksum"
LAZY = ("zstd-lazy", "zstd-partial")
ZSTD_LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"


def push_lazy(
    registry: Registry, folder: Path, compression: str = "zstd-lazy", more: dict[str, str] | None = None
) -> PublishedImage:
    """`more` are files of another layer."""
    layers = [*base_layers(), *([more] if more else [])]
    archive = fix(folder, compression, *map(make_layer, layers), compression=compression)
    for layer in archive.layers:
        registry.put_file(layer.path, layer.blob)
    registry.put_blob(archive.config, CONFIG)
    registry.put_manifest("lazy", archive.manifest, IMAGE)
    return find_image(registry, "lazy")


def push_changed(
    registry: Registry,
    image: PublishedImage,
    content: bytes | None = None,
    annotations: Mapping[str, str] | None = None,
) -> PublishedImage:
    """The image with another last layer, which `annotations` describe."""
    manifest = image.manifest.content
    layer = manifest["layers"][-1]
    if content is not None:
        layer |= registry.put_blob(content, ZSTD_LAYER).as_json()
    layer["annotations"] = {**layer["annotations"], **(annotations or {})}
    registry.put_manifest("changed", json.dumps(manifest).encode(), IMAGE)
    return find_image(registry, "changed")


def last_layer(registry: Registry, image: PublishedImage) -> bytes:
    return registry.blob(image.manifest.layers[-1])


def with_table(layer: bytes, change: Callable[[dict[str, Any]], object]) -> tuple[bytes, dict[str, str]]:
    """The layer with a changed table of contents in place, and the annotation that names it."""
    offset, packed, _, kind, magic = struct.unpack("<QQQQ8s", layer[-40:])
    document = json.loads(zstandard.decompress(layer[offset : offset + packed]))
    change(document)
    text = json.dumps(document, separators=(",", ":")).encode()
    table = zstandard.compress(text)
    split = layer[offset + packed : -48]
    footer = struct.pack("<QQQQ8s", offset, len(table), len(text), kind, magic)
    frames = struct.pack("<4sI", b"\x50\x2a\x4d\x18", len(table)) + table + split
    return layer[: offset - 8] + frames + layer[-48:-40] + footer, {STARGZ: digest_of(text)}


@pytest.mark.parametrize("compression", LAZY)
def test_lazy_image_is_read_back_like_any_other(registry: Registry, tmp_path: Path, compression: str) -> None:
    image = push_lazy(registry, tmp_path, compression)
    read = read_layers(registry, image)
    assert read.inventory
    assert {wheel.name for wheel in read.inventory.wheels} == {"torch", "typing-extensions"}
    assert check_existence(registry, image) == image


@pytest.mark.parametrize("look", [read_layers, check_existence])
@pytest.mark.parametrize(("compression", "annotation"), [("zstd-lazy", STARGZ), ("zstd-partial", CHECKSUM)])
def test_table_that_is_not_the_annotated_one_is_refused(
    registry: Registry,
    tmp_path: Path,
    compression: str,
    annotation: str,
    look: Callable[[Registry, PublishedImage], PublishedImage],
) -> None:
    image = push_lazy(registry, tmp_path, compression)
    changed = push_changed(registry, image, annotations={annotation: digest_of(b"another")})
    with pytest.raises(TrustError, match=rf"another table of contents than its annotation {annotation} says"):
        look(registry, changed)


def rename(document: dict[str, Any]) -> None:
    document["entries"][-1]["name"] = "etc/other"


def swap_content(document: dict[str, Any]) -> None:
    document["entries"][-1]["chunkDigest"] = digest_of(b"evil")


def add_file(document: dict[str, Any]) -> None:
    document["entries"].append({**document["entries"][-1], "name": "opt/evil.py"})


def hide_file(document: dict[str, Any]) -> None:
    document["entries"].pop()


def make_executable(document: dict[str, Any]) -> None:
    document["entries"][0]["mode"] = 0o4755


@pytest.mark.parametrize("change", [rename, swap_content, add_file, hide_file, make_executable])
def test_annotated_table_that_does_not_describe_the_tar_is_refused(
    registry: Registry, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """The tar is what the bills of materials list; a lazy snapshotter mounts what the table says."""
    image = push_lazy(registry, tmp_path)
    content, annotation = with_table(last_layer(registry, image), change)
    with pytest.raises(TrustError, match="does not describe its layer, first at"):
        read_layers(registry, push_changed(registry, image, content, annotation))


def test_table_with_a_key_that_parsers_read_differently_is_refused(registry: Registry, tmp_path: Path) -> None:
    image = push_lazy(registry, tmp_path)
    content, annotation = with_table(
        last_layer(registry, image), lambda document: document.update(Entries=[{"type": "reg", "name": "evil"}])
    )
    with pytest.raises(TrustError, match="is not written as `buildkit publish` writes it"):
        read_layers(registry, push_changed(registry, image, content, annotation))


@pytest.mark.parametrize(
    "damage",
    [
        lambda layer: layer[:-1] + b"?",
        lambda layer: layer[:-40] + struct.pack("<Q", 2**63) + layer[-32:],
        lambda layer: layer[:-40] + bytes(16) + layer[-24:],
        lambda layer: layer[-30:],
        lambda layer: layer[: len(layer) // 2],
    ],
)
def test_layer_without_a_whole_table_is_refused(
    registry: Registry, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    image = push_lazy(registry, tmp_path)
    content = damage(last_layer(registry, image))
    with pytest.raises(TrustError, match="does not end with a table of contents"):
        check_existence(registry, push_changed(registry, image, content))


def test_registry_that_sends_no_parts_of_blobs_is_named(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = push_lazy(registry, tmp_path)
    send = registry._send

    def without_ranges(*arguments: Any, byte_range: str = "", **options: Any) -> Any:
        return send(*arguments, **options)

    monkeypatch.setattr(registry, "_send", without_ranges)
    with pytest.raises(RegistryError, match="does not send parts of a blob"):
        check_existence(registry, image)


def test_chunks_of_another_size_are_read_as_well(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version may cut files elsewhere."""
    with monkeypatch.context() as patch:
        patch.setattr("buildkit.registry.chunked.CHUNK", 4096)
        image = push_lazy(registry, tmp_path, more={"opt/large": "x" * 10_000})
    layer = last_layer(registry, image)
    offset, packed = struct.unpack("<QQ", layer[-40:-24])
    assert b'"chunkSize":4096' in zstandard.decompress(layer[offset : offset + packed])
    assert read_layers(registry, image).inventory
