"""Resolves what a user adds to an image against the image's lock, which stays as it is.

An addition is refused if it needs another version of what is locked, or has files that a locked wheel has, too: to
install it would replace that wheel in part.
"""

import logging
from dataclasses import replace

import requests
from packaging.requirements import Requirement
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion, Version

from buildkit.errors import ExtensionError
from buildkit.host.settings import HostSettings
from buildkit.recipe.extension import Extension
from buildkit.recipe.lock import STANDS_FOR, Lock, Pin, WheelFacts, parse_pins
from buildkit.recipe.matrix import Variant
from buildkit.supply.resolve import UvError, compile_pins, glibc_too_old
from buildkit.supply.simple_index import OfferedFile, offered_files
from buildkit.supply.wheel_facts import is_named, read_wheel_facts, read_wheel_files

log = logging.getLogger(__name__)

VENDORS = ("torch", "torchaudio", "torchvision", "transformers", "triton", "vllm")  # in the image of a vendor
OTHER_PINS = "leave it out, or make a variant with other versions: docs/guides/extend.md"


def resolve_extension(
    variant: Variant, extension: Extension, lock: Lock, host: HostSettings, preferred: str
) -> tuple[tuple[Pin, ...], dict[str, WheelFacts]]:
    """The wheels that the extension adds to those of the lock, and their facts.

    Versions in `preferred` stay if they still fit. Raises `ExtensionError` for what contradicts the lock, and
    `LockError` when an index cannot be read.
    """
    if not extension.requirements:
        return (), {}
    asked = [(Requirement(text), place) for text, place in extension.requirements.items()]
    refuse_contradictions(asked, variant, lock)
    refuse_other_files(asked, extension, variant, lock)
    built_in = present(variant, lock).keys() - lock.versions.keys()
    absent: dict[str, str] = {canonicalize_name(name): reason for name, reason in variant.exclude.items()}
    for name in {canonicalize_name(requirement.name) for requirement, _ in asked} & absent.keys():
        log.warning("extension: adds %s, which %s leaves out: %s", name, variant.target, absent.pop(name))
    try:
        wanted = [str(requirement) for requirement, _ in asked if canonicalize_name(requirement.name) not in built_in]
        text = compile_pins(wanted, variant, host, preferred, {*absent, *built_in}, lock.constraints)
    except UvError as error:
        if too_old := glibc_too_old(wanted, variant, host):
            raise ExtensionError(
                f"what {files(asked)} asks for does not load in {variant.identifier}: {too_old}",
                "name a version with wheels for an older C library, or make a variant with a newer base",
            ) from error
        raise ExtensionError(
            f"what {files(asked)} asks for does not fit into the lock of {variant.identifier}:\n{error}",
            f"the lock's versions stay as they are: {OTHER_PINS}",
        ) from error
    pins = tuple(accepted(pin, extension) for pin in parse_pins(text) if pin.name not in lock.versions)
    names = frozenset(pin.name for pin in pins)
    tell_of_archives(asked, pins, host)
    machine = variant.platform.machine
    facts = read_wheel_facts(pins, variant.base, host, variant.prune, variant.source_only, names, machine)
    needed = [(Requirement(text), name) for name, wheel in facts.items() for text in wheel.requires]
    refuse_contradictions(needed, variant, lock)
    refuse_missing(needed, absent, variant)
    refuse_replaced(pins, variant, lock, host)
    return pins, facts


def files(asked: list[tuple[Requirement, str]]) -> str:
    """The files that ask, without lines."""
    return " and ".join(dict.fromkeys(place.partition(",")[0] for _, place in asked))


def present(variant: Variant, lock: Lock) -> dict[str, str]:
    """The version of each distribution in the image by the name that others require; empty where only the image tells.

    Next to what is locked, these are what a locked distribution stands for, and what a vendor's base contains.
    """
    vendors = dict.fromkeys(VENDORS if variant.base.vendor else (), "")
    stand_ins = {STANDS_FOR[name]: version for name, version in lock.versions.items() if name in STANDS_FOR}
    return {**vendors, **stand_ins, **lock.versions}


def refuse_contradictions(asked: list[tuple[Requirement, str]], variant: Variant, lock: Lock) -> None:
    """Refuses requirements on what the image has in another version; each comes with the place that states it."""
    versions = present(variant, lock)
    for requirement, place in asked:
        name = canonicalize_name(requirement.name)
        if name not in versions or not variant.applies(requirement):
            continue
        version = versions[name]
        if requirement.specifier and not (version and requirement.specifier.contains(version, prereleases=True)):
            raise ExtensionError(
                f"{place}: `{requirement}` contradicts {variant.identifier}, which has {name} "
                + (version or f"of {variant.base.image}"),
                OTHER_PINS,
            )


def refuse_other_files(
    asked: list[tuple[Requirement, str]], extension: Extension, variant: Variant, lock: Lock
) -> None:
    """Refuses requirements on what the image has, of which their file lists the hashes of other files."""
    hashes = {pin.name: pin.hashes for pin in lock.pins}
    for requirement, place in asked:
        name = canonicalize_name(requirement.name)
        listed = extension.hashes.get(name)
        if listed and name in hashes and variant.applies(requirement) and not listed & hashes[name]:
            raise ExtensionError(
                f"{place}: {name} {lock.versions[name]} of {variant.identifier} has no sha256 that is listed there",
                "find out which of both was changed; a file that lists hashes lists those of every platform",
            )


def refuse_missing(needed: list[tuple[Requirement, str]], absent: dict[str, str], variant: Variant) -> None:
    """Refuses additions that need what the image leaves out: they would fail at run time."""
    owners: dict[str, str] = {}
    for requirement, owner in needed:
        name = canonicalize_name(requirement.name)
        if name in absent and variant.applies(requirement):
            owners.setdefault(name, owner)
    if owners:
        reasons = "; ".join(f"{owner} needs {name} ({absent[name]})" for name, owner in owners.items())
        raise ExtensionError(
            f"{variant.target} leaves out what the requirements need: {reasons}",
            f"add {', '.join(owners)} to the requirements if you want that in the image nevertheless",
        )


def accepted(pin: Pin, extension: Extension) -> Pin:
    """The pin with those of its hashes that the user's file accepts."""
    listed = extension.hashes.get(pin.name)
    if listed is None:
        return pin
    hashes = pin.hashes & listed
    if not hashes:
        raise ExtensionError(
            f"no index has {pin.name} {pin.version} with a sha256 that the requirements list",
            "find out which of both was changed; a file that lists hashes lists those of every platform",
        )
    first = pin.text.splitlines()[0].rstrip("\\ ")
    lines = " \\\n".join([first, *(f"    --hash=sha256:{sha256}" for sha256 in sorted(hashes))])
    return replace(pin, hashes=hashes, text=f"{lines}\n")


def tell_of_archives(asked: list[tuple[Requirement, str]], pins: tuple[Pin, ...], host: HostSettings) -> None:
    """Warns where the newest version that a user accepts has no wheel: an older one is taken."""
    versions = {pin.name: Version(pin.version) for pin in pins}
    with requests.Session() as session:
        session.verify = str(host.ca_bundle) if host.ca_bundle else True
        for requirement, place in asked:
            name = canonicalize_name(requirement.name)
            newer = [
                version
                for version in (archive_version(file) for file in offered_files(name, host, session))
                if version and name in versions and version > versions[name] and requirement.specifier.contains(version)
            ]
            if newer:
                log.warning(
                    "extension: %s: %s %s is taken, because %s has no wheel, and archives would run code in the build",
                    *(place, name, versions[name], max(newer)),
                )


def archive_version(file: OfferedFile) -> Version | None:
    """The version of a source archive; None for a wheel and for a name without a version."""
    try:
        return None if file.is_wheel else parse_sdist_filename(file.filename)[1]
    except (InvalidSdistFilename, InvalidVersion):
        return None


def refuse_replaced(pins: tuple[Pin, ...], variant: Variant, lock: Lock, host: HostSettings) -> None:
    """Refuses additions with files that a locked wheel, or another addition, has with other content."""
    log.info("extension: comparing the files of %d wheels with those of the lock", len(pins))
    wheels = read_wheel_files((*lock.pins, *pins), variant.base, host, variant.platform.machine)
    owners: dict[str, tuple[str, int]] = {}
    for name, files in wheels.items():
        for path, checksum in files.items():
            other, known = owners.setdefault(path, (name, checksum))
            if known != checksum and name not in lock.versions and not is_named(path, variant.prune):
                raise ExtensionError(f"{name} would replace {path} of {other}", OTHER_PINS)
