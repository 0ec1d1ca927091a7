"""Compresses a layer as zstd:chunked: one frame for each chunk of a file, so that a reader fetches single files.

Any decompressor of zstd gives the tar unchanged, and the layer has the same diff id as an ordinary one.
"""

import tarfile
from collections.abc import Callable

import zstandard

from buildkit.registry.content import digest_of
from buildkit.registry.contents import CHUNK, Contents, Entry, Listing, table_of, tar_name
from buildkit.registry.tar_split import Crc64, TarSplit


class ChunkedCompressor:
    """`annotations` exist after `flush`. `annotate` chooses the reader that they are for."""

    def __init__(self, level: int, annotate: Callable[[Contents], dict[str, str]]) -> None:
        self._zstd, self._annotate = zstandard.ZstdCompressor(level=level), annotate
        self._written = 0  # bytes of the layer
        self._between, self._segment = (
            bytearray(),
            bytearray(),
        )  # headers and padding, not in a frame or in the split yet
        self._listing, self._split = Listing(CHUNK), TarSplit(level)
        self._member: tarfile.TarInfo | None = None
        self._checksum = Crc64()
        self.annotations: dict[str, str] = {}

    def entry(self, member: tarfile.TarInfo, header: bytes) -> bytes:
        packed = self.compress(header)
        self._end_segment()
        self._listing.add(member)
        self._member, self._checksum = member, Crc64()
        return packed

    def content(self, piece: bytes) -> bytes:
        self._checksum.update(piece)
        return self._place(self._listing.take(piece))

    def compress(self, data: bytes) -> bytes:
        packed = self._end_file()
        self._between += data
        self._segment += data
        return packed

    def flush(self) -> bytes:
        packed = self._end_file() + self._frame(self._between)
        self._end_segment()
        split = self._split.finish()
        table = table_of({"version": 1, "entries": self._listing.entries, "tarSplitDigest": digest_of(split)})
        contents = Contents(table, self._zstd.compress(table), split, self._split.size, self._written)
        self.annotations = self._annotate(contents)
        return packed + contents.frames

    def _end_segment(self) -> None:
        self._split.add_segment(self._segment)
        self._segment.clear()

    def _end_file(self) -> bytes:
        packed = self._place(self._listing.finish())
        if self._member:
            size = self._member.size if self._member.isreg() else 0
            self._split.add_file(tar_name(self._member), size, self._checksum.digest())
            self._member = None
        return packed

    def _place(self, chunks: list[tuple[Entry, bytes]]) -> bytes:
        """The frames of chunks, whose entries get their places."""
        packed = bytearray()
        for entry, content in chunks:
            if self._between:
                packed += self._frame(self._between)
                self._between.clear()
            entry["offset"] = self._written
            packed += self._frame(content)
            entry["endOffset"] = self._written
        return bytes(packed)

    def _frame(self, content: bytes | bytearray) -> bytes:
        packed = self._zstd.compress(content)
        self._written += len(packed)
        return packed
