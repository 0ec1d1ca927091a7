"""The table of contents of a zstd:chunked layer: every file of its tar, and where the layer has it.

The layer is a zstd file whose frames hold the tar's headers and the files' chunks in turn. Frames that a decompressor
skips follow: this table, the tar without its files, and a footer. Two kinds of runtime read it and name its digest with
different annotations; containers/storage refuses a layer that has both.

https://github.com/containerd/stargz-snapshotter/blob/main/docs/estargz.md defines the entries,
https://github.com/containers/storage/blob/main/pkg/chunked/internal/minimal/compression.go the frames. The footer is
stargz-snapshotter's; containers/storage reads the annotations instead.
"""

import hashlib
import json
import struct
import tarfile
from base64 import b64encode
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import zip_longest
from typing import Any

import zstandard

from buildkit.errors import BuildError, TrustError
from buildkit.registry.client import Registry
from buildkit.registry.content import Descriptor, digest_of

XATTR = "SCHILY.xattr."  # extended attributes in a tar's headers, such as file capabilities
CHUNK = 2**20  # bytes of a file that a reader fetches at once, at most
LIMIT = 2**28  # bytes of a table of contents, and of a tar without its files
FRAME = struct.Struct("<4sI")  # magic number and size of a frame that decompressors skip (RFC 8878, 3.1.2)
SKIPPED = b"\x50\x2a\x4d\x18"
FOOTER = struct.Struct("<4Q8s")  # of the table: offset, bytes, bytes when unpacked, type; and a magic number
MAGIC = b"GnUlInUx"
CRFS = 1  # the table's type
PLACES = ("offset", "endOffset")  # of a chunk in the layer
UNTRUSTED = "do not use this image; publish it again"

STARGZ = "containerd.io/snapshot/stargz/toc.digest"
PARTIAL = "io.github.containers.zstd-chunked."

TYPES = {
    tarfile.REGTYPE: "reg",
    tarfile.AREGTYPE: "reg",
    tarfile.LNKTYPE: "hardlink",
    tarfile.SYMTYPE: "symlink",
    tarfile.CHRTYPE: "char",
    tarfile.BLKTYPE: "block",
    tarfile.DIRTYPE: "dir",
    tarfile.FIFOTYPE: "fifo",
}
Entry = dict[str, Any]


def tar_name(member: tarfile.TarInfo) -> str:
    """The name in the tar: that of a folder ends with a slash."""
    return f"{member.name}/" if member.isdir() else member.name


def describe(member: tarfile.TarInfo) -> Entry:
    """The entry of a tar's member without its content. Raises `BuildError` for what a table cannot hold."""
    if member.type not in TYPES:
        raise BuildError(
            f"{member.name!r} has the type {member.type!r}, which a table of contents does not have",
            "choose --compression zstd",
        )
    try:
        f"{member.name}{member.linkname}".encode()
    except UnicodeEncodeError as error:
        raise BuildError(f"the name {member.name!r} is not UTF-8", "choose --compression zstd") from error
    device = (member.devmajor, member.devminor) if member.ischr() or member.isblk() else (0, 0)
    xattrs = {
        name.removeprefix(XATTR): b64encode(value.encode(errors="surrogateescape")).decode()
        for name, value in member.pax_headers.items()
        if name.startswith(XATTR)
    }
    optional = {
        "linkName": member.linkname if member.issym() or member.islnk() else "",
        "size": member.size if member.isreg() else 0,
        "devMajor": device[0],
        "devMinor": device[1],
        "xattrs": xattrs,
    }
    return {
        "type": TYPES[member.type],
        "name": tar_name(member),
        "mode": member.mode & 0o7777,
        "uid": member.uid,
        "gid": member.gid,
        "modtime": datetime.fromtimestamp(member.mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **{name: value for name, value in optional.items() if value},
    }


class Listing:
    """Collects the entries of a tar that is read or written from front to back, without the files' places.

    `chunk` is the size in bytes at which files are cut.
    """

    def __init__(self, chunk: int) -> None:
        self.entries: list[Entry] = []
        self._chunk, self._rest = chunk, bytearray()
        self._file: Entry = {}
        self._done, self._hash = 0, hashlib.sha256()

    def add(self, member: tarfile.TarInfo) -> None:
        """Begins a member; `finish` ended the last one."""
        self._file, self._done, self._hash = describe(member), 0, hashlib.sha256()
        self.entries.append(self._file)

    def take(self, piece: bytes) -> list[tuple[Entry, bytes]]:
        """Content of the member. The result is each chunk that it completes, with the chunk's entry."""
        self._hash.update(piece)
        self._rest += piece
        return [self._cut() for _ in range(len(self._rest) // self._chunk)]

    def finish(self) -> list[tuple[Entry, bytes]]:
        """Ends the member, if there is one. The result is the chunk that was not complete yet."""
        chunks = [self._cut()] if self._rest else []
        if self._done:
            self._file["digest"] = f"sha256:{self._hash.hexdigest()}"
        self._done = 0
        return chunks

    def _cut(self) -> tuple[Entry, bytes]:
        content = bytes(self._rest[: self._chunk])
        del self._rest[: self._chunk]
        entry = self._file
        if self._done:
            entry = {"type": "chunk", "name": self._file["name"], "chunkOffset": self._done}
            self.entries.append(entry)
        entry |= {"chunkSize": len(content), "chunkDigest": digest_of(content)}
        self._done += len(content)
        return entry, content


def table_of(document: dict[str, Any]) -> bytes:
    """The table as JSON, in one way only: parsers differ in what they make of a key that comes twice."""
    kept = {name: document[name] for name in ("version", "entries", "tarSplitDigest")}
    return json.dumps(kept, separators=(",", ":")).encode()


def skipped(content: bytes) -> bytes:
    """A frame that decompressors skip."""
    return FRAME.pack(SKIPPED, len(content)) + content


@dataclass(frozen=True)
class Contents:
    """What follows the files of a layer, from `offset`: the table as JSON, and the tar without its files.

    `packed` and `split` are both of them compressed; `split_size` is the size of the second before that.
    """

    table: bytes
    packed: bytes
    split: bytes
    split_size: int
    offset: int

    @property
    def frames(self) -> bytes:
        footer = FOOTER.pack(self.offset + FRAME.size, len(self.packed), len(self.table), CRFS, MAGIC)
        return skipped(self.packed) + skipped(self.split) + skipped(footer)

    def stargz_annotations(self) -> dict[str, str]:
        """For stargz-snapshotter and stargz-store, which mount a layer."""
        return {STARGZ: digest_of(self.table)}

    def partial_annotations(self) -> dict[str, str]:
        """For containers/storage, which fetches the files of a layer that the host does not have."""
        offset = self.offset + FRAME.size
        split = offset + len(self.packed) + FRAME.size
        return {
            f"{PARTIAL}manifest-checksum": digest_of(self.packed),
            f"{PARTIAL}manifest-position": f"{offset}:{len(self.packed)}:{len(self.table)}:{CRFS}",
            f"{PARTIAL}tarsplit-position": f"{split}:{len(self.split)}:{self.split_size}",
        }

    @cached_property
    def document(self) -> dict[str, Any]:
        """The table. Raises `TrustError` when it is none."""
        try:
            document: dict[str, Any] = json.loads(self.table)
            valid = all(isinstance(entry, dict) for entry in document["entries"]) and table_of(document) == self.table
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TrustError(f"a table of contents cannot be read: {error!r}", UNTRUSTED) from error
        if not valid:
            raise TrustError("a table of contents is not written as `buildkit publish` writes it", UNTRUSTED)
        return document

    @property
    def chunk(self) -> int:
        """Bytes of its chunks. Raises `TrustError` when the table names no possible size."""
        sizes = [size for entry in self.document["entries"] if type(size := entry.get("chunkSize")) is int]
        largest = max(sizes, default=CHUNK)
        if not 0 < largest <= LIMIT:
            raise TrustError(f"a table of contents has chunks of {largest} bytes", UNTRUSTED)
        return largest

    def check(self, listing: Listing) -> None:
        """Raises `TrustError` unless the table lists exactly the files of the layer's tar, with their content."""
        entries = self.document["entries"]
        listed = [{name: value for name, value in entry.items() if name not in PLACES} for entry in entries]
        if listed != listing.entries:
            pairs = zip_longest(listed, listing.entries)
            name = next((one or other or {}).get("name") for one, other in pairs if one != other)
            raise TrustError(f"a table of contents does not describe its layer, first at {name!r}", UNTRUSTED)


def read_contents(registry: Registry, layer: Descriptor) -> Contents | None:
    """The table of contents of a layer, read with range requests as a runtime reads it; None for an ordinary layer.

    Raises `TrustError` unless it is the one that the layer's annotations name.
    """
    annotated = {name: value for name, value in layer.annotations.items() if name == STARGZ or name.startswith(PARTIAL)}
    if not annotated:
        return None
    contents = read_frames(registry, layer)
    found = contents.stargz_annotations() | contents.partial_annotations()
    for name, value in annotated.items():
        if found.get(name) != value:
            raise TrustError(
                f"the layer {layer.digest} has another table of contents than its annotation {name} says: "
                f"{found.get(name)}, not {value}",
                UNTRUSTED,
            )
    if contents.document.get("tarSplitDigest") != digest_of(contents.split):
        raise TrustError(f"the tar split of the layer {layer.digest} is not the one of its table", UNTRUSTED)
    return contents


def read_frames(registry: Registry, layer: Descriptor) -> Contents:
    """Raises `TrustError` for a layer that does not end with the three frames."""
    problem = TrustError(f"the layer {layer.digest} does not end with a table of contents", UNTRUSTED)
    end = FRAME.size + FOOTER.size
    if layer.size < end:
        raise problem
    start, packed, *_ = FOOTER.unpack(registry.blob_range(layer, layer.size - FOOTER.size, FOOTER.size))
    offset, split = start - FRAME.size, start + packed + FRAME.size
    if not 0 <= offset < split <= layer.size - end <= offset + LIMIT:
        raise problem
    frames = registry.blob_range(layer, offset, layer.size - offset)
    try:
        table, whole = unpack(frames[FRAME.size :][:packed]), unpack(frames[split - offset : -end])
    except zstandard.ZstdError as error:
        raise problem from error
    contents = Contents(table, frames[FRAME.size :][:packed], frames[split - offset : -end], len(whole), offset)
    if contents.frames != frames:
        raise problem
    return contents


def unpack(frame: bytes) -> bytes:
    """Up to `LIMIT` bytes."""
    with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
        return reader.read(LIMIT)
