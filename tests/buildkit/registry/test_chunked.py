"""zstd:chunked layers, read by a reader that is written from the formats' definitions alone.

https://github.com/containerd/stargz-snapshotter/blob/main/docs/estargz.md defines the table of contents,
https://github.com/vbatts/tar-split the tar without its files.
"""

import base64
import hashlib
import io
import json
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from buildkit.errors import BuildError
from buildkit.images.archive import FixedLayer
from buildkit.registry.compression import COMPRESSIONS, tar_of
from buildkit.registry.contents import CHUNK
from buildkit.registry.tar_split import Crc64
from tests.buildkit.images.test_archive import add, fix

LAZY = ("zstd-lazy", "zstd-partial")
BLOCK = 512
ReadRange = Callable[[int, int], bytes]


def a_layer() -> bytes:
    """Every kind of member, and files around the size of a chunk."""
    noise = random.Random(7).randbytes(3 * CHUNK + 1000)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as layer:
        add(layer, "opt", b"", type=tarfile.DIRTYPE, mode=0o755)
        add(layer, "opt/empty", b"")
        add(layer, "opt/small.py", b"print('hello')\n", uid=7, gid=8)
        add(layer, "opt/large.so", noise, mode=0o755)
        add(layer, "opt/one_chunk", noise[:CHUNK])
        add(layer, "opt/two_chunks", bytes(2 * CHUNK))
        add(layer, f"opt/{'long-' * 30}name", b"x")
        add(layer, "opt/Főtanúsítvány.crt", b"certificate")
        add(layer, "opt/ping", b"#!", pax_headers={"SCHILY.xattr.security.capability": "\x01\udcff"})
        add(layer, "opt/link", b"", type=tarfile.SYMTYPE, linkname="small.py")
        add(layer, "opt/same", b"", type=tarfile.LNKTYPE, linkname="opt/small.py")
        add(layer, "opt/null", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3)
        add(layer, "opt/.wh.gone", b"")
    return buffer.getvalue()


def written(folder: Path, compression: str, layer: bytes) -> FixedLayer:
    return fix(folder, compression, layer, compression=compression).layers[0]


def tar_in(layer: FixedLayer) -> bytes:
    with layer.path.open("rb") as file:
        return bytes(tar_of(file).read(-1))


# ---- the reader ------------------------------------------------------------------------------------------------------


def ranges_of(layer: FixedLayer) -> tuple[ReadRange, list[int]]:
    """A reader of ranges, and the sizes of those that it read."""
    sizes: list[int] = []

    def read(offset: int, size: int) -> bytes:
        sizes.append(size)
        with layer.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    return read, sizes


def table_by_footer(read: ReadRange, size: int) -> tuple[dict[str, Any], bytes]:
    """The table of contents as stargz-snapshotter finds it, and its JSON."""
    offset, packed, _, kind, magic = struct.unpack("<QQQQ8s", read(size - 40, 40))
    assert (kind, magic) == (1, b"GnUlInUx")
    text = zstandard.decompress(read(offset, packed))
    return json.loads(text), text


def content_of(read: ReadRange, entries: list[dict[str, Any]], name: str) -> bytes:
    """A file, from the ranges of its chunks alone."""
    first = next(number for number, entry in enumerate(entries) if entry["name"] == name)
    content = bytearray()
    for entry in entries[first:]:
        if entry["name"] != name or len(content) == entries[first].get("size", 0):
            break
        assert entry.get("chunkOffset", 0) == len(content)
        chunk = zstandard.decompress(read(entry["offset"], entry["endOffset"] - entry["offset"]))
        assert len(chunk) == entry["chunkSize"]
        assert entry["chunkDigest"] == f"sha256:{hashlib.sha256(chunk).hexdigest()}"
        content += chunk
    return bytes(content)


def crc64(content: bytes) -> bytes:
    """CRC-64/GO-ISO, bit by bit."""
    register = 2**64 - 1
    for byte in content:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0xD800000000000000 if register & 1 else 0)
    return (register ^ 2**64 - 1).to_bytes(8, "big")


# ---- what holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", LAZY)
def test_every_file_is_found_by_the_table_with_range_reads_alone(tmp_path: Path, compression: str) -> None:
    layer = written(tmp_path, compression, a_layer())
    read, sizes = ranges_of(layer)
    entries = table_by_footer(read, layer.blob.size)[0]["entries"]
    listed = {entry["name"].rstrip("/"): entry for entry in entries if entry["type"] != "chunk"}
    with tarfile.open(fileobj=io.BytesIO(tar_in(layer))) as archive:
        members = archive.getmembers()
        assert list(listed) == [member.name for member in members]
        for member in members:
            entry = listed[member.name]
            assert (entry["mode"], entry["uid"], entry["gid"]) == (member.mode, member.uid, member.gid)
            assert entry.get("linkName", "") == member.linkname
            file = archive.extractfile(member) if member.isreg() else None
            if content := file.read() if file else b"":
                sizes.clear()
                assert content_of(read, entries, entry["name"]) == content
                assert entry["size"] == len(content)
                assert entry["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
                assert len(sizes) == -(-len(content) // CHUNK)
                assert sum(sizes) < len(content) + 1000  # this file's chunks and nothing else
    assert listed["opt"]["type"] == "dir"
    assert (listed["opt/null"]["devMajor"], listed["opt/null"]["devMinor"]) == (1, 3)
    assert base64.b64decode(listed["opt/ping"]["xattrs"]["security.capability"]) == b"\x01\xff"


@pytest.mark.parametrize("compression", LAZY)
def test_same_tar_gives_the_same_bytes_twice(tmp_path: Path, compression: str) -> None:
    one, other = (
        written(tmp_path / name, compression, a_layer()) for name in ("1", "2") if not (tmp_path / name).mkdir()
    )
    assert one.blob == other.blob


def test_ordinary_decompressor_gives_the_tar_of_every_other_compression(tmp_path: Path) -> None:
    layers = {name: written(tmp_path, name, a_layer()) for name in COMPRESSIONS}
    assert len({layer.diff_id for layer in layers.values()}) == 1
    assert len({tar_in(layer) for layer in layers.values()}) == 1
    assert layers["zstd-lazy"].blob.digest == layers["zstd-partial"].blob.digest


def test_annotations_name_the_table_as_each_runtime_reads_it(tmp_path: Path) -> None:
    lazy, partial = (written(tmp_path, name, a_layer()) for name in LAZY)
    read, _ = ranges_of(lazy)
    text = table_by_footer(read, lazy.blob.size)[1]
    assert lazy.blob.annotations == {
        "containerd.io/snapshot/stargz/toc.digest": f"sha256:{hashlib.sha256(text).hexdigest()}"
    }
    prefix = "io.github.containers.zstd-chunked."
    assert {name.removeprefix(prefix) for name in partial.blob.annotations} == {
        "manifest-checksum",
        "manifest-position",
        "tarsplit-position",
    }
    offset, size, plain, kind = map(int, partial.blob.annotations[f"{prefix}manifest-position"].split(":"))
    packed = read(offset, size)
    assert partial.blob.annotations[f"{prefix}manifest-checksum"] == f"sha256:{hashlib.sha256(packed).hexdigest()}"
    assert zstandard.decompress(packed) == text
    assert (plain, kind) == (len(text), 1)


def test_tar_without_its_files_and_the_files_make_the_same_tar(tmp_path: Path) -> None:
    layer = written(tmp_path, "zstd-partial", a_layer())
    read, _ = ranges_of(layer)
    table, _ = table_by_footer(read, layer.blob.size)
    position = layer.blob.annotations["io.github.containers.zstd-chunked.tarsplit-position"]
    offset, size, plain = map(int, position.split(":"))
    packed = read(offset, size)
    assert table["tarSplitDigest"] == f"sha256:{hashlib.sha256(packed).hexdigest()}"
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    assert len(lines) == plain
    tar = bytearray()
    for number, line in enumerate(lines.splitlines()):
        entry = json.loads(line)
        assert entry["position"] == number
        if entry["type"] == 2:
            tar += base64.b64decode(entry["payload"])
        elif entry.get("size"):
            content = content_of(read, table["entries"], entry["name"])
            tar += content
            if len(content) < CHUNK:  # the others take seconds, bit by bit
                assert base64.b64decode(entry["payload"]) == crc64(content)
    assert bytes(tar) == tar_in(layer)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 63, 64, 65, 1984, 1985, 2**16 + 1])
def test_checksum_is_that_of_the_catalogue_in_any_pieces(length: int) -> None:
    content = random.Random(length).randbytes(length)
    checksum = Crc64()
    checksum.update(content[: length // 3])
    checksum.update(content[length // 3 :])
    assert checksum.digest() == crc64(content)
    assert crc64(b"123456789").hex() == "b90956c775a41001"  # the catalogue's check value


@pytest.mark.parametrize(
    ("attributes", "message"),
    [({"name": "caf\udce9"}, "is not UTF-8"), ({"name": "a", "type": tarfile.CONTTYPE}, "which a table of contents")],
)
def test_what_a_table_cannot_hold_is_refused(tmp_path: Path, attributes: dict[str, Any], message: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        add(layer, content=b"x", **attributes)
    with pytest.raises(BuildError, match=message):
        written(tmp_path, "zstd-lazy", buffer.getvalue())
