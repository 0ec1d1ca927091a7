"""Compression of a layer's tar: zstd (RFC 8878) or gzip.

https://github.com/opencontainers/image-spec/blob/main/layer.md.
"""

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, Protocol, cast

import zstandard

from buildkit.registry.answers import BLOCK
from buildkit.registry.content import Descriptor

LEVEL = 9  # of zstd: smaller than gzip's default, and written faster
WINDOW = 2**27  # bytes that a zstd frame may ask its reader to hold
ERRORS = (OSError, EOFError, zlib.error, zstandard.ZstdError)
"""Exceptions from reading a damaged layer."""


class Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


@dataclass(frozen=True)
class Compression:
    """`magic` begins each compressed file; `unpack` reads a file's content from front to back."""

    media_type: str
    magic: bytes
    compressor: Callable[[], Compressor]
    unpack: Callable[[BinaryIO], Any]


def unpack_zstd(file: BinaryIO) -> Any:
    return zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(file, read_across_frames=True)


COMPRESSIONS = {
    "zstd": Compression(
        "application/vnd.oci.image.layer.v1.tar+zstd",
        b"\x28\xb5\x2f\xfd",
        lambda: zstandard.ZstdCompressor(level=LEVEL).compressobj(),
        unpack_zstd,
    ),
    "gzip": Compression(
        "application/vnd.oci.image.layer.v1.tar+gzip",
        b"\x1f\x8b",
        lambda: zlib.compressobj(wbits=31),  # its header holds no name and no time
        lambda file: gzip.GzipFile(fileobj=file),
    ),
}


class LayerSink:
    """Writes a tar compressed into a file, and computes the digests of both."""

    def __init__(self, file: BinaryIO, compressor: Compressor) -> None:
        self._file, self._compressor = file, compressor
        self._tar, self._blob = hashlib.sha256(), hashlib.sha256()
        self._tar_size = self._size = 0

    def add(self, member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        self._write(member.tobuf(tarfile.PAX_FORMAT, "utf-8"))
        if content:
            for piece in iter(lambda: content.read(BLOCK), b""):
                self._write(piece)
            self._pad(tarfile.BLOCKSIZE)

    def _pad(self, unit: int) -> None:
        self._write(bytes(-self._tar_size % unit))

    def _write(self, plain: bytes) -> None:
        self._tar.update(plain)
        self._tar_size += len(plain)
        self._keep(self._compressor.compress(plain))

    def _keep(self, packed: bytes) -> None:
        self._blob.update(packed)
        self._size += self._file.write(packed)

    def finish(self, media_type: str) -> tuple[str, Descriptor]:
        """The digest of the tar, and the description of the file."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._pad(tarfile.RECORDSIZE)
        self._keep(self._compressor.flush())
        return f"sha256:{self._tar.hexdigest()}", Descriptor(media_type, f"sha256:{self._blob.hexdigest()}", self._size)


def tar_of(layer: BinaryIO) -> BinaryIO:
    """The tar of a layer, compressed or not, to be read from front to back."""
    head = layer.read(4)
    whole = cast(BinaryIO, Prefixed(head, layer))
    compression = next((row for row in COMPRESSIONS.values() if head.startswith(row.magic)), None)
    return cast(BinaryIO, compression.unpack(whole)) if compression else whole


class Prefixed:
    """A file whose first bytes were read already."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._pending, self._rest = head, rest

    def read(self, size: int) -> bytes:
        if self._pending:
            piece, self._pending = self._pending[:size], self._pending[size:]
            return piece
        return self._rest.read(size)
