"""Reads facts of locked wheels from the index, before anything is installed.

A wheel is a zip (https://packaging.python.org/specifications/binary-distribution-format/); its directory of contents is
at the end, so HTTP range requests for a few kilobytes give sizes, libraries and metadata.
"""

import fnmatch
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.parser import HeaderParser
from pathlib import PurePosixPath
from typing import TypeVar

import requests
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from remotezip import RemoteZip, RemoteZipError
from urllib3.exceptions import LocationValueError

from buildkit.errors import LockError
from buildkit.host.accelerators import ACCELERATORS
from buildkit.host.settings import HostSettings
from buildkit.recipe.lock import Pin, WheelFacts
from buildkit.recipe.matrix import Base
from buildkit.recipe.platform import AMD64
from buildkit.supply.simple_index import TIMEOUT, OfferedFile, offered_wheels

Result = TypeVar("Result")
LIBRARIES = "|".join(name for row in ACCELERATORS.values() for name in (row.collectives, row.runtime_library) if name)
MANYLINUX = re.compile(r"manylinux_2_(\d+)_")
LEGACY = ((17, "manylinux2014"), (12, "manylinux2010"), (5, "manylinux1"))  # names of glibc 2.17, 2.12 and 2.5
LIBRARY = re.compile(rf"lib(?:{LIBRARIES})\.so\.\d+")
SMALLEST = 2**20  # bytes of a library that may hold GPU code
SPREAD = {"purelib": "", "platlib": "", "data": "../../../", "scripts": "../../../bin/"}
FATBIN = struct.pack("<I", 0xBA55ED50)  # marks a library's GPU code for one or more architectures
CUBIN = 2  # kind of entry: machine code of one architecture; 1 is PTX


def read_wheel_facts(
    pins: Iterable[Pin],
    base: Base,
    host: HostSettings,
    pruned: Iterable[str],
    source_only: Iterable[str],
    roots: frozenset[str],
    machine: str = AMD64.machine,
) -> dict[str, WheelFacts]:
    """Facts of every pin; for `roots` also their requirements and the architectures of their GPU code.

    Patterns: the image leaves `pruned` files out of site-packages and compiles no `source_only` file.
    Raises `LockError` when a wheel cannot be found or read.
    """
    left_out, not_compiled = tuple(pruned), tuple(source_only)

    def facts(pin: Pin, offered: OfferedFile, wheel: zipfile.ZipFile) -> WheelFacts:
        read = facts_of(wheel, pin.name, left_out, not_compiled, pin.name in roots)
        return replace(read, glibc=oldest_glibc(offered))

    return {wheel.name: wheel for wheel in read_wheels(pins, base, host, machine, facts)}


def read_wheel_files(pins: Iterable[Pin], base: Base, host: HostSettings, machine: str) -> dict[str, dict[str, int]]:
    """The checksum (CRC-32) of each file by its installed path, for each distribution. Raises as `read_wheels` does."""

    def files(pin: Pin, _offered: OfferedFile, wheel: zipfile.ZipFile) -> tuple[str, dict[str, int]]:
        return pin.name, {installed_path(entry.filename): entry.CRC for entry in wheel.infolist() if not entry.is_dir()}

    return dict(read_wheels(pins, base, host, machine, files))


def read_wheels(
    pins: Iterable[Pin],
    base: Base,
    host: HostSettings,
    machine: str,
    read: Callable[[Pin, OfferedFile, zipfile.ZipFile], Result],
) -> list[Result]:
    """The results of `read` for each pin and its wheel. Raises `LockError` when a wheel cannot be found or read."""
    tags = {tag: rank for rank, tag in enumerate(platform_tags(base.python, base.glibc, machine))}
    with requests.Session() as session, ThreadPoolExecutor(8) as pool:
        session.verify = str(host.ca_bundle) if host.ca_bundle else True

        def open_and_read(pin: Pin) -> Result:
            offered = find_wheel(pin, tags, host, session)
            with open_wheel(offered.location, session) as wheel:
                return read(pin, offered, wheel)

        try:
            return list(pool.map(open_and_read, pins))
        except (RemoteZipError, zipfile.BadZipFile, OSError, LocationValueError) as error:  # requests' are OSErrors
            raise LockError(
                f"a wheel's contents could not be read: {error}",
                "check that the package index can be reached and serves parts of files (HTTP ranges)",
            ) from error


def platform_tags(python: str, glibc: str, machine: str) -> Iterator[Tag]:
    """The tags of Linux on this machine with this C library, best first."""
    version = tuple(int(part) for part in python.split("."))
    newest = int(glibc.partition(".")[2])
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, 4, -1)]
    for minor, alias in LEGACY:
        platforms.insert(platforms.index(f"manylinux_2_{minor}_{machine}") + 1, f"{alias}_{machine}")
    platforms.append(f"linux_{machine}")
    yield from cpython_tags(version, platforms=platforms)
    yield from compatible_tags(version, f"cp{version[0]}{version[1]}", platforms)


def oldest_glibc(wheel: OfferedFile) -> str:
    """The oldest C library that a tag of the wheel names; empty if none does."""
    *_, tags = parse_wheel_filename(wheel.filename)
    minors = [int(match[1]) for tag in tags if (match := MANYLINUX.match(tag.platform))]
    minors += [minor for minor, alias in LEGACY for tag in tags if tag.platform.startswith(f"{alias}_")]
    return f"2.{min(minors)}" if minors else ""


def find_wheel(pin: Pin, tags: dict[Tag, int], host: HostSettings, session: requests.Session) -> OfferedFile:
    """The wheel that uv would install: its hash is in the lock, its tag the best for this platform.

    A wheel whose index or folder names no hash counts by its version.
    """
    ranked = []
    for wheel in offered_wheels(pin.name, host, session):
        try:
            _, version, _, wheel_tags = parse_wheel_filename(wheel.filename)
        except InvalidWheelFilename:
            continue
        known = wheel.sha256 in pin.hashes or (not wheel.digests and str(version) == pin.version)
        ranks = [tags[tag] for tag in wheel_tags if tag in tags]
        if known and ranks:
            ranked.append((min(ranks), wheel))
    if not ranked:
        raise LockError(
            f"no index has a wheel of {pin.name} {pin.version} for this Python and machine",
            "exclude the distribution in images/matrix.toml, or pin a version that has one",
        )
    return min(ranked, key=lambda pair: (pair[0], pair[1].location))[1]


def wheels_for_newer_glibc(
    pins: Iterable[Pin], base: Base, host: HostSettings, machine: str = AMD64.machine
) -> dict[str, str]:
    """The oldest C library that a pinned distribution has wheels for, by name, where the base's is older than that.

    Raises `LockError` for a server that is no simple index, `requests.RequestException` where none answers.
    """
    tags = set(platform_tags(base.python, base.glibc, machine))
    with_any = set(platform_tags(base.python, "2.99", machine))
    needed = {}
    with requests.Session() as session:
        session.verify = str(host.ca_bundle) if host.ca_bundle else True
        for pin in pins:
            minors: list[int] = []
            for wheel in offered_wheels(pin.name, host, session):
                try:
                    _, version, _, wheel_tags = parse_wheel_filename(wheel.filename)
                except InvalidWheelFilename:
                    continue
                if str(version) == pin.version and wheel_tags & with_any:
                    minors.append(0 if wheel_tags & tags else int(oldest_glibc(wheel).partition(".")[2]))
            if lowest := min(minors, default=0):
                needed[pin.name] = f"2.{lowest}"
    return needed


def open_wheel(location: str, session: requests.Session) -> zipfile.ZipFile:
    if "://" in location:
        # A wheel is compressed already, and a compressed range could not be decoded.
        wheel: zipfile.ZipFile = RemoteZip(
            location, session=session, timeout=TIMEOUT, headers={"Accept-Encoding": "identity"}
        )
        return wheel
    return zipfile.ZipFile(location)


def facts_of(
    wheel: zipfile.ZipFile, name: str, pruned: tuple[str, ...], source_only: tuple[str, ...], root: bool
) -> WheelFacts:
    kept = [entry for entry in wheel.infolist() if not is_named(installed_path(entry.filename), pruned)]
    python = [entry for entry in kept if entry.filename.endswith(".py")]
    compiled = [entry for entry in python if not is_named(installed_path(entry.filename), source_only)]
    libraries = {match[0] for entry in kept if (match := LIBRARY.match(PurePosixPath(entry.filename).name))}
    metadata = next(entry for entry in wheel.infolist() if entry.filename.endswith(".dist-info/METADATA"))
    headers = HeaderParser().parsestr(wheel.read(metadata).decode(errors="replace"))
    requires = [" ".join(line.split()) for line in headers.get_all("Requires-Dist", []) if "extra ==" not in line]
    return WheelFacts(
        name=name,
        bytes=sum(entry.file_size for entry in kept),
        python_bytes=sum(entry.file_size for entry in compiled),
        libraries=tuple(sorted(libraries)),
        architectures=tuple(sorted(architectures(wheel, kept))) if root else (),
        requires_python=headers.get("Requires-Python", "") if root else "",
        requires=tuple(sorted(requires)) if root else (),
    )


def installed_path(path: str) -> str:
    """The installed path of a wheel's file, relative to site-packages; `x.data/` spreads over the environment."""
    parts = path.split("/")
    if len(parts) > 2 and parts[0].endswith(".data") and parts[1] in SPREAD:
        return SPREAD[parts[1]] + "/".join(parts[2:])
    return path


def is_named(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the file or a folder above it. `*` does not match `/`, as in a shell."""
    parts = path.split("/")
    for pattern in patterns:
        wanted = pattern.split("/")
        if len(parts) >= len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)):
            return True
    return False


def architectures(wheel: zipfile.ZipFile, entries: Iterable[zipfile.ZipInfo]) -> set[str]:
    """The architectures (`sm_90` …) for which the wheel's libraries have machine code."""
    architectures: set[str] = set()
    for entry in entries:
        if ".so" in PurePosixPath(entry.filename).name and entry.file_size > SMALLEST:
            architectures |= library_architectures(wheel.read(entry))
    return architectures


def library_architectures(content: bytes) -> set[str]:
    """The architectures in a library's fat binaries.

    Each has a header of 16 bytes, then entries with kind, header size, size and architecture.
    """
    architectures = set()
    start = content.find(FATBIN)
    while start >= 0:
        (size,) = struct.unpack_from("<Q", content, start + 8)
        place, end = start + 16, min(start + 16 + size, len(content))
        while place + 64 <= end:
            kind, _, header, length = struct.unpack_from("<HHIQ", content, place)
            (architecture,) = struct.unpack_from("<I", content, place + 28)
            if kind == CUBIN and 50 <= architecture < 1000:
                architectures.add(f"sm_{architecture}")
            if header == 0:
                break
            place += header + length
        start = content.find(FATBIN, max(start + 16, end if size < 2**33 else start + 16))
    return architectures
