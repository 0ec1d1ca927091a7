"""A tar without the content of its files: with it, a reader of single files can put the same tar together again.

The format is tar-split's JSON lines: a segment holds headers and padding, a file stands for its content, with a
checksum (https://github.com/vbatts/tar-split/blob/main/tar/storage/entry.go).
"""

import json
from base64 import b64encode

import zstandard

FILE, SEGMENT = 1, 2
ONES = 2**64 - 1
PIECE = 2**16  # bytes of an integer that the processor's cache holds


class TarSplit:
    """`size` counts the bytes before compression."""

    def __init__(self, level: int) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level).compressobj()
        self._packed = bytearray()
        self._count = self.size = 0

    def add_segment(self, content: bytes | bytearray) -> None:
        self._add({"type": SEGMENT, "payload": b64encode(content).decode()})

    def add_file(self, name: str, size: int, checksum: bytes) -> None:
        """`checksum` is the content's CRC-64, ignored for an empty file."""
        content = {"size": size, "payload": b64encode(checksum).decode()} if size else {"payload": None}
        self._add({"type": FILE, "name": name, **content})

    def _add(self, entry: dict[str, object]) -> None:
        line = json.dumps({**entry, "position": self._count}).encode() + b"\n"
        self._packed += self._compressor.compress(line)
        self._count += 1
        self.size += len(line)

    def finish(self) -> bytes:
        """All of it, compressed."""
        return bytes(self._packed + self._compressor.flush())


class Crc64:
    """CRC-64/GO-ISO, the checksum of tar-split (https://reveng.sourceforge.io/crc-catalogue/17plus.htm#crc.cat.crc-64-go-iso).

    Its polynomial is P = x^64 + x^4 + x^3 + x + 1. Over GF(2) squaring is linear, so x^(64k) mod P has the four terms
    x^(4k) + x^(3k) + x^k + 1 for each power of two k: a few shifts of one large integer halve the message. Bit 0 of the
    integer is the highest power, because this checksum takes each byte's lowest bit first.
    """

    def __init__(self) -> None:
        self._register = ONES

    def update(self, content: bytes) -> None:
        for start in range(0, len(content), PIECE):
            self._take(content[start : start + PIECE])

    def _take(self, piece: bytes) -> None:
        value, length = int.from_bytes(piece, "little") ^ self._register, 8 * len(piece) + 64
        while length > 64:
            k = 1 << ((length - 1) // 64).bit_length() - 1
            count = min(length - 64 * k, 60 * k)  # of the highest powers, which the lower ones take in
            high = value & ((1 << count) - 1)
            value >>= count
            for power in (0, k, 3 * k, 4 * k):
                value ^= high << (64 * k - power - count)
            length -= count
        self._register = value

    def digest(self) -> bytes:
        return (self._register ^ ONES).to_bytes(8, "big")
