"""Prints, as JSON, every library that a shared object in the image needs and no folder of it has: {library: [objects]}.

Arguments: folders with objects; after `--`, folders of vendors, which count as places but are not checked.

Runs inside the image with its standard library only. ELF: https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html
"""

import json
import struct
import sys
from pathlib import Path
from typing import BinaryIO

LOAD, DYNAMIC = 1, 2  # program headers
NEEDED, STRTAB = 1, 5  # entries of the dynamic section


def main(*arguments: str) -> None:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    objects, vendors = shared_objects(arguments[:end]), shared_objects(arguments[end + 1 :])
    present = {path.name for path in (*objects, *vendors)}
    missing: dict[str, list[str]] = {}
    for path in objects:
        if not path.is_symlink():
            for library in needed(path):
                if library not in present:
                    missing.setdefault(library, []).append(str(path))
    json.dump(missing, sys.stdout)


def shared_objects(roots: tuple[str, ...]) -> list[Path]:
    return [path for root in roots for path in Path(root).rglob("*.so*") if path.is_file()]


def needed(path: Path) -> list[str]:
    """The NEEDED entries of a 64-bit little-endian ELF file; none of anything else."""
    with path.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            return []
        offset, size, count = (
            struct.unpack_from("<Q", header, 32)[0],
            *struct.unpack_from("<HH", header, 54),
        )
        segments = []
        for number in range(count):
            file.seek(offset + number * size)
            kind, _, place, address, _, length = struct.unpack("<IIQQQQ", file.read(40))
            segments.append((kind, place, address, length))
        dynamic = next(((place, length) for kind, place, _, length in segments if kind == DYNAMIC), None)
        if dynamic is None:
            return []
        file.seek(dynamic[0])
        entries = list(struct.iter_unpack("<qQ", file.read(dynamic[1] // 16 * 16)))
        address = next(value for tag, value in entries if tag == STRTAB)
        strings = next(
            place + address - start
            for kind, place, start, length in segments
            if kind == LOAD and start <= address < start + length
        )
        return [read_string(file, strings + value) for tag, value in entries if tag == NEEDED]


def read_string(file: BinaryIO, place: int) -> str:
    file.seek(place)
    return file.read(256).split(b"\0")[0].decode()


if __name__ == "__main__":
    main(*sys.argv[1:])
