"""Supplies the base image from a registry, or makes it from Debian packages with mmdebstrap."""

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import requests

from buildkit.errors import BaseError, LockError, RegistryError, SettingsError
from buildkit.recipe.lock import Deb, Lock, PackageChange, package_changes
from buildkit.recipe.matrix import Base, Variant
from buildkit.registry.client import Registry
from buildkit.registry.content import Manifest
from buildkit.registry.credentials import read_credentials
from buildkit.registry.reference import Reference, parse_reference
from buildkit.running.engine import ContainerEngine, full_name

log = logging.getLogger(__name__)

ARCHIVE = "https://snapshot.debian.org/archive"
PATIENCE = 5.0  # seconds that a registry has to answer with a digest
LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:|$)")

# Debian's own slim images leave out the same paths (https://github.com/debuerreotype/debuerreotype).
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*")
KEPT = ("/usr/share/doc/*/copyright",)

# Runs last in the new root: removes files that belong to this host or differ between runs, and names Debian's mirror.
CLEAN = """
rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/preferences.d/*
rm -rf "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/tmp/slipway-debs
rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1"/var/cache/ldconfig/aux-cache "$1"/var/cache/debconf/*-old
find "$1"/var/log -type f -delete
rm -f "$1"/etc/machine-id "$1"/etc/hostname "$1"/etc/resolv.conf
cat >"$1"/etc/apt/sources.list.d/debian.sources <<'END'
{sources}END
"""
SOURCES = """Types: deb
URIs: {address}
Suites: {suites}
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""

# Runs first in the new root: adds a second suite of the same mirror to apt's sources.
ALSO = """sed -n 's/ {suite} main$/ {also} main/p' "$1"/etc/apt/sources.list >"$1"/etc/apt/sources.list.d/also.list"""

# Runs before that in the new root: prints the record of every installed package, with the checksum of its file.
LIST = "dpkg-query -W -f '${Package}=${Version}\\n' | xargs apt-cache show"
FIELD = re.compile(r"^(Package|Version|SHA256): (.+)$", re.MULTILINE)


def choose_provider(base: Base, requested: str, engine: ContainerEngine, lock: Lock) -> tuple[str, str]:
    """The provider and the reason for it. `auto` takes the first that is locked and available.

    Raises `BaseError` when none is available, `LockError` when the requested provider is not locked.
    """
    if requested != "auto":
        if requested not in base.providers:
            raise BaseError(
                f"base {base.name} has no provider `{requested}`", f"one of: auto, {', '.join(base.providers)}"
            )
        if refusal := lock_refusal(requested, lock):
            raise LockError(f"--base {requested}: {refusal}", f"run `buildkit lock` where {WHERE[requested]}")
        return requested, "requested"
    refusals: list[str] = []
    for provider in base.providers:
        refusal = lock_refusal(provider, lock) or AVAILABLE[provider](lock, engine)
        if not refusal:
            return provider, "; ".join([*refusals, f"{provider} is available"])
        refusals.append(f"{provider}: {refusal}")
    raise BaseError(
        f"no provider can supply base {base.name}: {'; '.join(refusals)}",
        "make the registry reachable, or install mmdebstrap (`apt-get install mmdebstrap`); then run `buildkit lock`",
    )


def lock_refusal(provider: str, lock: Lock) -> str:
    """The reason why the lock does not pin this provider's base; empty if it does."""
    if provider == "registry":
        return "" if lock.base_digest else f"the lock has no digest of {lock.base}"
    return "" if lock.debs else "the lock has no Debian packages"


def registry_digest(base: Base) -> str:
    """The digest in the matrix, or else the tag's current digest, for all platforms. Raises `RegistryError`."""
    return parse_reference(full_name(base.image)).digest or base_manifest(base.image).descriptor.digest


def base_manifest(image: str) -> Manifest:
    """The manifest of a base's image in its registry. Raises `RegistryError`."""
    reference = parse_reference(full_name(image))
    credentials = read_credentials(reference.host)

    def fetch(image: Reference) -> Manifest | None:
        return Registry(image, credentials, patience=PATIENCE).manifest(image.digest or image.tag)

    try:
        manifest = fetch(reference)
    except RegistryError:
        if not LOOPBACK.match(reference.host):
            raise
        manifest = fetch(replace(reference, secure=False))  # engines fall back to HTTP on their own host, too
    if manifest is None:
        raise RegistryError(f"{reference.host} has no {image}", "check the base's `image` in images/matrix.toml")
    return manifest


def registry_refusal(lock: Lock, engine: ContainerEngine) -> str:
    if engine.find(lock.base_reference) is None:
        try:
            base_manifest(lock.base_reference)
        except (RegistryError, SettingsError) as error:
            return str(error)
    return ""


def bootstrap_refusal(_lock: Lock, _engine: ContainerEngine | None = None) -> str:
    return "" if shutil.which("mmdebstrap") else "mmdebstrap is not installed"


WHERE = {"registry": "the base's registry answers", "bootstrap": "mmdebstrap is installed"}
AVAILABLE: dict[str, Callable[[Lock, ContainerEngine], str]] = {
    "registry": registry_refusal,
    "bootstrap": bootstrap_refusal,
}


@dataclass(frozen=True)
class Bootstrapped:
    """A root file system as a tar, and its Debian packages."""

    tar: Path
    debs: tuple[Deb, ...]

    @property
    def bytes(self) -> int:
        """Uncompressed size of the files."""
        with tarfile.open(self.tar) as archive:
            return sum(member.size for member in archive)


@dataclass(frozen=True)
class CachedBase:
    """The place of a root file system in the cache: `tar`, and beside it the records of its packages."""

    tar: Path

    def find(self) -> Bootstrapped | None:
        records = self.tar.with_suffix(".debs")
        if not (self.tar.is_file() and records.is_file()):
            return None
        log.info("base: using %s from the cache", self.tar.name)
        return Bootstrapped(self.tar, read_debs(records.read_text()))

    def keep(self, made: Bootstrapped) -> Bootstrapped:
        """Moves a root file system here."""
        shutil.copy2(made.tar.with_suffix(".debs"), self.tar.with_suffix(".debs"))
        made.tar.replace(self.tar)
        return replace(made, tar=self.tar)


def cached_base(variant: Variant, cache: Path, debs: tuple[Deb, ...], epoch: int, suffix: str = "") -> CachedBase:
    packages = (f"{deb.name} {deb.version} {deb.sha256}" for deb in debs)
    words = [*mmdebstrap_command(variant), last_hook(variant), str(epoch), *packages]
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    return CachedBase(cache / "bases" / f"{variant.base.name}-{key}{suffix}.tar")


def bootstrap(
    variant: Variant, cache: Path, locked: tuple[Deb, ...], epoch: int, only_locked: bool = True
) -> Bootstrapped:
    """A root file system of the `locked` packages, made once and kept in `cache`.

    If the host's mirror has moved on, they come from Debian's archive of the lock's day. If that cannot supply them
    either, `only_locked` raises `LockError`; otherwise the mirror's packages take the place of those that are gone.
    Raises `BaseError` when mmdebstrap fails. A failure leaves no file behind.
    """
    exact = cached_base(variant, cache, locked, epoch)
    newer = cached_base(variant, cache, locked, epoch, "-newer")
    if supplied := exact.find() or (None if only_locked else newer.find()):
        return supplied
    with making_base(variant, cache) as folder:
        made = run_mmdebstrap(variant, folder / "mirror", locked, epoch)
        changes = package_changes(locked, made.debs)
        if not changes:
            return exact.keep(made)
        moved_on = drift(variant, changes)
        log.warning("base: %s", moved_on)
        if archived := from_archive(variant, folder / "archive", locked, epoch):
            return exact.keep(archived)
        if only_locked:
            raise moved_on
        log.warning("base: its packages are resolved again, alone; the image is not the one that was locked")
        return newer.keep(made)


def resolve_base(variant: Variant, cache: Path, preferred: tuple[Deb, ...], epoch: int) -> Bootstrapped:
    """A root file system of the packages that the host's mirror has: `preferred` versions, else the newest.

    It stays in `cache` for `bootstrap`. Raises `BaseError` when mmdebstrap fails.
    """
    with making_base(variant, cache) as folder:
        made = run_mmdebstrap(variant, folder / "mirror", preferred, epoch)
        return cached_base(variant, cache, made.debs, epoch).keep(made)


@contextmanager
def making_base(variant: Variant, cache: Path) -> Iterator[Path]:
    """A folder beside the cached bases, for one that is being made. Raises `BaseError` if it cannot be."""
    if variant.base.bootstrap is None:
        raise BaseError(f"base {variant.base.name} cannot be bootstrapped", "use --base registry")
    log.info("base: making %s from %d Debian packages and their dependencies", variant.base.name, len(variant.packages))
    (cache / "bases").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slipway-base-", dir=cache / "bases") as folder:
        yield Path(folder)


def from_archive(variant: Variant, folder: Path, locked: tuple[Deb, ...], epoch: int) -> Bootstrapped | None:
    """The root file system from Debian's archive of the lock's day; None if that cannot supply every locked package."""
    try:
        requests.head(ARCHIVE, timeout=PATIENCE)
    except requests.RequestException as error:
        log.warning("base: Debian's archive of old packages does not answer (%s)", type(error).__name__)
        return None
    log.info("base: trying Debian's archive of the lock's day")
    try:
        made = run_mmdebstrap(variant, folder, locked, epoch, archive(variant, epoch))
    except BaseError as error:
        log.warning("base: %s", error)
        return None
    return made if set(made.debs) == set(locked) else None


def archive(variant: Variant, epoch: int) -> tuple[str, ...]:
    """apt's sources of a suite as it was at the end of a day, from Debian's archive of all days."""
    suite = (variant.base.bootstrap or {})["suite"]
    day = datetime.fromtimestamp(epoch, UTC).strftime("%Y%m%dT235959Z")
    main = f"deb {ARCHIVE}/debian/{day} {suite} main"
    if suite in ("sid", "unstable"):
        return (main,)
    updates = f"deb {ARCHIVE}/debian/{day} {suite}-updates main"
    return main, updates, f"deb {ARCHIVE}/debian-security/{day} {suite}-security main"


def last_hook(variant: Variant) -> str:
    """`CLEAN` with the base's public sources, so that `apt-get` works in an image that is built from ours."""
    suite = (variant.base.bootstrap or {})["suite"]
    suites = {"debian": suite}
    if suite not in ("sid", "unstable"):
        suites = {"debian": f"{suite} {suite}-updates", "debian-security": f"{suite}-security"}
    parts = (SOURCES.format(address=f"{public_mirror()}/{name}", suites=names) for name, names in suites.items())
    return CLEAN.format(sources="\n".join(parts))


@cache
def public_mirror() -> str:
    """The address of Debian's public mirror, which its public images name, too. Release files are signed.

    mmdebstrap has it built in, and prints it to a hook that ends it before it fetches anything. Raises `BaseError`.
    """
    hook = '--setup-hook=cat "$1"/etc/apt/sources.list; exit 1'
    with tempfile.TemporaryDirectory() as folder:
        command = ["mmdebstrap", "--mode=chrootless", "--variant=custom", hook, "stable", f"{folder}/none.tar"]
        try:
            ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        except OSError as error:
            raise BaseError(f"mmdebstrap cannot be started: {error.strerror}", "apt-get install mmdebstrap") from error
    match = re.search(r"^deb (\S+)/debian stable main", ended.stdout, re.MULTILINE)
    if match is None:
        raise BaseError("mmdebstrap names no mirror of Debian", "upgrade mmdebstrap")
    return match[1]


def mmdebstrap_command(variant: Variant) -> list[str]:
    settings = variant.base.bootstrap or {}
    command = ["mmdebstrap", "--quiet", f"--variant={settings['variant']}", '--aptopt=APT::Install-Recommends "false"']
    command += [f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT]
    command += [f"--dpkgopt=path-include={path}" for path in KEPT]
    if "also" in settings:  # a suite that moves on daily outlives the dates in its index where mirrors are slow
        command.append('--aptopt=Acquire::Check-Valid-Until "false"')
        command.append(f"--setup-hook={ALSO.format(**settings)}")
    return [*command, f"--include={','.join(variant.packages)}", settings["suite"]]


def run_mmdebstrap(
    variant: Variant, folder: Path, wanted: tuple[Deb, ...], epoch: int, sources: tuple[str, ...] = ()
) -> Bootstrapped:
    """A root file system in a new `folder`, with the `wanted` versions where the mirror has them.

    `sources` replace the host's mirror. Raises `BaseError` when mmdebstrap fails.
    """
    folder.mkdir()
    tar, listing, pins = folder / "root.tar", folder / "root.debs", folder / "pins"
    pins.write_text(preferences(variant, wanted))
    hooks = [  # without root, hooks cannot reach this host's files; upload and download can
        f"--setup-hook=upload {shlex.quote(str(pins))} /etc/apt/preferences.d/slipway-lock",
        f'--customize-hook=chroot "$1" sh -c {shlex.quote(LIST)} >"$1"/tmp/slipway-debs',
        f"--customize-hook=download /tmp/slipway-debs {shlex.quote(str(listing))}",
        f"--customize-hook={last_hook(variant)}",
    ]
    undated = ['--aptopt=Acquire::Check-Valid-Until "false"'] if sources else []  # an old index has expired
    command = mmdebstrap_command(variant)
    done = subprocess.run(
        [*command[:-1], *undated, *hooks, command[-1], str(tar), *sources],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        reason = "\n".join(f"  {line}" for line in done.stderr.strip().splitlines()[-8:])
        raise BaseError(
            f"mmdebstrap could not make {variant.base.name}:\n{reason}", "check apt's sources with `apt-get update`"
        )
    return Bootstrapped(tar, read_debs(listing.read_text()))


def preferences(variant: Variant, wanted: tuple[Deb, ...]) -> str:
    """apt_preferences(5): the wanted versions first, then the packages that come from the base's second suite."""
    pins = [(deb.name, f"version {deb.version}", 1002) for deb in wanted]
    settings = variant.base.bootstrap or {}
    if "also" in settings:
        pins.append((settings["take"], f"release a={settings['also']}", 1001))
    return "".join(f"Package: {name}\nPin: {origin}\nPin-Priority: {priority}\n\n" for name, origin, priority in pins)


def read_debs(records: str) -> tuple[Deb, ...]:
    """The packages in the output of `apt-cache show`; a package that several sources offer counts once."""
    paragraphs = (dict(FIELD.findall(paragraph)) for paragraph in records.split("\n\n") if paragraph.strip())
    return tuple(sorted({Deb(fields["Package"], fields["Version"], fields["SHA256"]) for fields in paragraphs}))


def drift(variant: Variant, changes: tuple[PackageChange, ...]) -> LockError:
    """An error that lists the differences between the lock and the mirror."""
    return LockError(
        f"the mirror has moved on from the lock of {variant.stock.identifier}: {shown(changes)}",
        f"run `buildkit lock --upgrade-base --target {variant.target} --variant {variant.name}`, or let this host "
        f"reach {ARCHIVE}, which keeps the packages of every day",
    )


def shown(changes: tuple[PackageChange, ...]) -> str:
    """The first differences in words: locked packages before those that came along."""
    changes = tuple(sorted(changes, key=lambda change: (not change.locked, change)))
    more = f" and {len(changes) - 8} more" if len(changes) > 8 else ""
    return ", ".join(map(str, changes[:8])) + more
