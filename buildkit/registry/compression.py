"""How the tar of a layer is compressed: zstd (RFC 8878), in one stream or in chunks, or gzip.

https://github.com/opencontainers/image-spec/blob/main/layer.md.
"""

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, BinaryIO, Protocol, cast

import zstandard

from buildkit.registry.answers import BLOCK
from buildkit.registry.chunked import ChunkedCompressor
from buildkit.registry.content import Descriptor
from buildkit.registry.contents import Contents

LEVEL = 9  # of zstd: smaller than gzip's default, and written faster
WINDOW = 2**27  # bytes that a zstd frame may ask its reader to hold
ERRORS = (OSError, EOFError, zlib.error, zstandard.ZstdError)
"""What reading a damaged layer raises."""


class Compressor(Protocol):
    """Takes a tar from front to back: `entry` each header, `content` files' bytes, `compress` what is between them."""

    @property
    def annotations(self) -> Mapping[str, str]:
        """Of the layer's descriptor, after `flush`."""

    def entry(self, member: tarfile.TarInfo, header: bytes) -> bytes: ...

    def content(self, piece: bytes) -> bytes: ...

    def compress(self, data: bytes) -> bytes: ...

    def flush(self) -> bytes: ...


class Stream:
    """One stream, which is read from its front."""

    annotations: Mapping[str, str] = {}

    def __init__(self, packer: Any) -> None:
        self.content = self.compress = packer.compress
        self.flush = packer.flush

    def entry(self, _member: tarfile.TarInfo, header: bytes) -> bytes:
        return bytes(self.compress(header))


@dataclass(frozen=True)
class Compression:
    """`magic` begins each compressed file; `unpack` reads a file's content from front to back."""

    media_type: str
    magic: bytes
    compressor: Callable[[], Compressor]
    unpack: Callable[[BinaryIO], Any]


def unpack_zstd(file: BinaryIO) -> Any:
    return zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(file, read_across_frames=True)


def zstd_row(compressor: Callable[[], Compressor]) -> Compression:
    return Compression("application/vnd.oci.image.layer.v1.tar+zstd", b"\x28\xb5\x2f\xfd", compressor, unpack_zstd)


COMPRESSIONS = {
    "zstd": zstd_row(lambda: Stream(zstandard.ZstdCompressor(level=LEVEL).compressobj())),
    "gzip": Compression(
        "application/vnd.oci.image.layer.v1.tar+gzip",
        b"\x1f\x8b",
        lambda: Stream(zlib.compressobj(wbits=31)),  # its header holds no name and no time
        lambda file: gzip.GzipFile(fileobj=file),
    ),
    "zstd-lazy": zstd_row(partial(ChunkedCompressor, LEVEL, Contents.stargz_annotations)),
    "zstd-partial": zstd_row(partial(ChunkedCompressor, LEVEL, Contents.partial_annotations)),
}
"""The last two write the same zstd:chunked layers, and annotate them for different runtimes."""


class LayerSink:
    """Writes a tar compressed into a file, and computes the digests of both."""

    def __init__(self, file: BinaryIO, compressor: Compressor) -> None:
        self._file, self._compressor = file, compressor
        self._tar, self._blob = hashlib.sha256(), hashlib.sha256()
        self._tar_size = self._size = 0

    def add(self, member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        header = member.tobuf(tarfile.PAX_FORMAT, "utf-8")
        self._keep(header, self._compressor.entry(member, header))
        if content:
            for piece in iter(lambda: content.read(BLOCK), b""):
                self._keep(piece, self._compressor.content(piece))
            self._pad(tarfile.BLOCKSIZE)

    def _pad(self, unit: int) -> None:
        padding = bytes(-self._tar_size % unit)
        self._keep(padding, self._compressor.compress(padding))

    def _keep(self, plain: bytes, packed: bytes) -> None:
        self._tar.update(plain)
        self._tar_size += len(plain)
        self._blob.update(packed)
        self._size += self._file.write(packed)

    def finish(self, media_type: str) -> tuple[str, Descriptor]:
        """The digest of the tar, and the description of the file."""
        end = bytes(2 * tarfile.BLOCKSIZE)
        self._keep(end, self._compressor.compress(end))
        self._pad(tarfile.RECORDSIZE)
        self._keep(b"", self._compressor.flush())
        digest = f"sha256:{self._blob.hexdigest()}"
        blob = Descriptor(media_type, digest, self._size, annotations=self._compressor.annotations)
        return f"sha256:{self._tar.hexdigest()}", blob


def tar_of(layer: BinaryIO) -> BinaryIO:
    """The tar of a layer, compressed or not, to be read from front to back."""
    head = layer.read(4)
    whole = cast(BinaryIO, Prefixed(head, layer))
    found = next((row for row in COMPRESSIONS.values() if head.startswith(row.magic)), None)
    return cast(BinaryIO, found.unpack(whole)) if found else whole


class Prefixed:
    """A file whose first bytes were read already."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._pending, self._rest = head, rest

    def read(self, size: int) -> bytes:
        if self._pending:
            piece, self._pending = self._pending[:size], self._pending[size:]
            return piece
        return self._rest.read(size)
