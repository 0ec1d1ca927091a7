"""What a lock says beyond the wheels' hashes, in comment lines, so that pip and uv read the file as it is.

# template: sha256:…              the Dockerfile that was rendered, without comments and labels
# epoch: 1795000000               seconds; every file in the image carries this time or an older one
# base: debian:bookworm-slim -    reference and digest; `-` where no registry could be asked
# base-bytes: 147000000           the bootstrapped base, uncompressed
# deb: tini 0.19.0-1 sha256:…     one line per Debian package of the bootstrapped base
# wheel: torch 713000000 38000000 installed bytes, and how many of them are Python that gets compiled
# library: libnccl.so.2 nvidia-nccl-cu13
# architecture: sm_90 torch
# requires-python: vllm >=3.11
# requires: vllm torch==2.13.0
"""

import re
from dataclasses import dataclass, field

LINE = re.compile(r"^# ([a-z-]+): (.+)$", re.MULTILINE)


@dataclass(frozen=True, order=True)
class Deb:
    name: str
    version: str
    sha256: str


@dataclass(frozen=True, order=True)
class WheelFacts:
    """What a wheel brings. `bytes` are uncompressed, `python_bytes` those of them that are Python and get compiled."""

    name: str
    bytes: int
    python_bytes: int
    libraries: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    requires_python: str = ""
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class LockFacts:
    template: str = ""
    epoch: int = 0
    base: str = ""
    base_digest: str = ""
    base_bytes: int = 0
    debs: tuple[Deb, ...] = ()
    wheels: dict[str, WheelFacts] = field(default_factory=dict)

    @property
    def base_reference(self) -> str:
        """The base's image by its digest, as an engine takes it; without one, its tag."""
        return f"{self.base.partition('@')[0]}@{self.base_digest}" if self.base_digest else self.base


def write_facts(facts: LockFacts) -> str:
    lines = [
        f"template: sha256:{facts.template}",
        f"epoch: {facts.epoch}",
        f"base: {facts.base} {facts.base_digest or '-'}",
        f"base-bytes: {facts.base_bytes}",
        *(f"deb: {deb.name} {deb.version} sha256:{deb.sha256}" for deb in sorted(facts.debs)),
    ]
    for wheel in sorted(facts.wheels.values()):
        lines.append(f"wheel: {wheel.name} {wheel.bytes} {wheel.python_bytes}")
        lines += [f"library: {library} {wheel.name}" for library in wheel.libraries]
        lines += [f"architecture: {architecture} {wheel.name}" for architecture in wheel.architectures]
        lines += [f"requires-python: {wheel.name} {wheel.requires_python}"] if wheel.requires_python else []
        lines += [f"requires: {wheel.name} {requirement}" for requirement in wheel.requires]
    return "".join(f"# {line}\n" for line in lines)


def read_facts(lock: str) -> LockFacts:
    """The facts in a lock's text; an unknown line is passed over, so that older tools read newer locks."""
    rows: dict[str, list[str]] = {}
    for key, value in LINE.findall(lock):
        rows.setdefault(key, []).append(value)
    base, _, digest = rows.get("base", [""])[0].partition(" ")
    return LockFacts(
        template=rows.get("template", [""])[0].removeprefix("sha256:"),
        epoch=int(rows.get("epoch", ["0"])[0]),
        base=base,
        base_digest="" if digest == "-" else digest,
        base_bytes=int(rows.get("base-bytes", ["0"])[0]),
        debs=tuple(read_deb(row) for row in rows.get("deb", [])),
        wheels={wheel.name: wheel for wheel in read_wheels(rows)},
    )


def read_deb(row: str) -> Deb:
    name, version, sha256 = row.split()
    return Deb(name, version, sha256.removeprefix("sha256:"))


def read_wheels(rows: dict[str, list[str]]) -> list[WheelFacts]:
    def second(key: str, name: str) -> tuple[str, ...]:
        """Lines `VALUE NAME`."""
        return tuple(value for value, owner in map(str.split, rows.get(key, [])) if owner == name)

    def rest(key: str, name: str) -> tuple[str, ...]:
        """Lines `NAME VALUE…`."""
        return tuple(value for owner, value in (row.split(" ", 1) for row in rows.get(key, [])) if owner == name)

    wheels = []
    for row in rows.get("wheel", []):
        name, size, python_size = row.split()
        python = rest("requires-python", name)
        wheels.append(
            WheelFacts(
                name,
                int(size),
                int(python_size),
                libraries=second("library", name),
                architectures=second("architecture", name),
                requires_python=python[0] if python else "",
                requires=rest("requires", name),
            )
        )
    return wheels
