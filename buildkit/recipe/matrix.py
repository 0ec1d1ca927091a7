"""Reads and validates `images/matrix.toml` and `images/env/*.toml`."""

import difflib
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from buildkit.errors import MatrixError, UsageError
from buildkit.host.accelerators import ACCELERATORS
from buildkit.host.settings import without_password
from buildkit.recipe.environment import EnvEntry, parse_environment
from buildkit.recipe.extension import Extension
from buildkit.recipe.platform import AMD64, ARM64, Platform, host_platform
from buildkit.recipe.toml import Value, build, read_toml, table_of, values_of
from buildkit.recipe.user_file import UserFile, read_user_file

STATUSES = ("proven", "untested")
SHARED = ("base", "architectures", "driver")  # what a target sets for those of its variants that do not
MERGED = ("requirements", "exclude", "prune", "indexes")  # lists and tables of a target to which its variants add
TOOLKIT = "cuda-toolkit"  # the distribution whose extras are the parts of one release of CUDA
DEBUG_SUFFIX, EXTENDED_SUFFIX = "-debug", "-extended"
GLIBC = re.compile(r"2\.\d{1,3}")


@dataclass(frozen=True)
class Base:
    """A base image: a public reference, and how mmdebstrap makes the same base without a registry.

    `glibc` is the version of its C library: wheels for a newer one are not resolved, because they would not load.
    In `bootstrap`, `also` is a second suite, from which the packages in `take` come; no public image has both suites.
    """

    name: str
    image: str
    python: str
    glibc: str
    bootstrap: dict[str, str] | None = None
    vendor: bool = False  # the image contains torch and vLLM

    @property
    def providers(self) -> tuple[str, ...]:
        """In order of preference."""
        if self.bootstrap and "also" in self.bootstrap:
            return ("bootstrap",)
        return ("registry", "bootstrap") if self.bootstrap else ("registry",)


@dataclass(frozen=True)
class VendorIndex:
    """A vendor's public wheel index: what it is for, and which requirements come `only` from there.

    Without `only`, the index goes before the host's own; with it, nothing else is taken from it.
    """

    purpose: str
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A set of compatible pins of one target.

    `exclude` maps a distribution to the reason for its exclusion, `prune` does the same for a path in site-packages
    (with `*`), and `source_only` for a path whose Python is not compiled; they include the target's and the matrix's,
    without those that the variant's table `keep` names. `indexes` are vendors' wheel indexes by their addresses.
    `architectures` are the supported GPUs, `driver` is the oldest driver that works, `rocm` the ROCm release in the
    image. `origin` is the user's slipway.toml that the variant comes from, `extension` what a user adds to the image.
    """

    target: str
    name: str
    base: Base
    status: str
    requirements: tuple[str, ...]
    exclude: dict[str, str]
    packages: tuple[str, ...]
    proof: str = ""
    prune: dict[str, str] = field(default_factory=dict)
    source_only: dict[str, str] = field(default_factory=dict)
    indexes: dict[str, VendorIndex] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    driver: str = ""
    rocm: str = ""
    disk_gib: int = 0  # free space that a build needs; the target's when 0
    debug: bool = False  # contains debuggers
    platform: Platform = AMD64
    origin: Path | None = None
    extension: Extension | None = None

    @property
    def identifier(self) -> str:
        """The name of its image."""
        return f"{self.target}-{self.name}{EXTENDED_SUFFIX if self.extension else ''}"

    @property
    def image_status(self) -> str:
        """The status of its image: what is proven of a variant says nothing about a user's additions."""
        return "untested" if self.extension else self.status

    @property
    def stock(self) -> "Variant":
        """The same variant without what a user adds."""
        return replace(self, extension=None)

    def extended(self, extension: Extension | None) -> "Variant":
        """The same variant, with this on top of what it is extended with already."""
        if extension is None:
            return self
        return replace(self, extension=self.extension.with_more(extension) if self.extension else extension)

    def for_platform(self, platform: Platform) -> "Variant":
        """The same variant for another platform, with a name of its own, because what is proven holds for one."""
        if platform == self.platform:
            return self
        return replace(self, name=self.name + platform.suffix, platform=platform, status="untested", proof="")

    def applies(self, requirement: Requirement) -> bool:
        """Whether a requirement's marker holds in the image."""
        environment: dict[str, str | AbstractSet[str]] = {
            **default_environment(),  # type: ignore[dict-item]  # a TypedDict of strings
            "python_version": self.base.python,
            "python_full_version": f"{self.base.python}.0",
            "platform_system": "Linux",
            "sys_platform": "linux",
            "platform_machine": self.platform.machine,
            "extra": "",
        }
        return requirement.marker is None or requirement.marker.evaluate(environment)

    @property
    def compiles_cuda(self) -> bool:
        """Whether the image has CUDA's compiler and headers, in /usr/local/cuda."""
        names = {canonicalize_name(Requirement(text).name) for text in self.requirements}
        return TOOLKIT in names - set(map(canonicalize_name, self.exclude))

    @property
    def trains(self) -> bool:
        """Whether the image has torch; without it, it shows only that libraries, fabric, launcher and Ray work."""
        return "torch" not in self.exclude


@dataclass(frozen=True)
class Target:
    name: str
    summary: str
    disk_gib: int
    variants: dict[str, Variant]

    @property
    def default(self) -> Variant:
        return next(iter(self.variants.values()))


@dataclass(frozen=True)
class WheelLayer:
    """Wheels that change together: `distributions` are names with `*`."""

    name: str
    distributions: tuple[str, ...]


@dataclass(frozen=True)
class Debuggers:
    """Packages and requirements that `--with-debug` adds to a variant."""

    requirements: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def added_to(self, variant: Variant) -> Variant:
        return replace(
            variant,
            name=f"{variant.name}{DEBUG_SUFFIX}",
            requirements=(*variant.requirements, *self.requirements),
            packages=tuple(sorted({*variant.packages, *self.packages})),
            status="untested",
            proof="",
            debug=True,
        )


@dataclass(frozen=True)
class Matrix:
    """`wheel_layers` in the order in which they are laid down; `rocm_architectures` by ROCm release.

    `user` is the slipway.toml whose variants are among those of `targets`.
    """

    root: Path
    targets: dict[str, Target]
    wheel_layers: tuple[WheelLayer, ...] = (WheelLayer("wheels", ("*",)),)
    rocm_architectures: dict[str, tuple[str, ...]] = field(default_factory=dict)
    debuggers: Debuggers = Debuggers()
    user: UserFile | None = None

    @property
    def images(self) -> Path:
        return self.root / "images"

    def variant(
        self, target: str, variant: str | None = None, with_debug: bool = False, platform: Platform | None = None
    ) -> Variant:
        """The named variant, or the target's default, for this host's platform or the given one, extended by the user.

        A name may end in `-arm64` for that platform, and then in `-debug` for the debuggers.

        Raises `UsageError` with the nearest match for an unknown target or variant.
        """
        chosen_target = pick(self.targets, target, "target")
        name = (variant or chosen_target.default.name).removesuffix(DEBUG_SUFFIX)
        if name.endswith(ARM64.suffix):
            name, platform = name.removesuffix(ARM64.suffix), ARM64
        chosen = pick(chosen_target.variants, name, f"variant of {target}").for_platform(platform or host_platform())
        if with_debug or (variant or "").endswith(DEBUG_SUFFIX):
            chosen = self.debuggers.added_to(chosen)
        return chosen.extended(self.user.extension if self.user else None)

    def is_default(self, variant: Variant) -> bool:
        """Whether it is its target's default, on any platform."""
        return variant.name.removesuffix(variant.platform.suffix) == self.targets[variant.target].default.name

    def env(self, target: str, debug: bool = False) -> tuple[EnvEntry, ...]:
        """The run-time environment of a target: the common entries, then its own, then the debuggers'."""
        entries: list[EnvEntry] = []
        for name in ("common", target, *(("debug",) if debug else ())):
            path = self.images / "env" / f"{name}.toml"
            entries += parse_environment(read_toml(path), path)
        return tuple(entries)


def pick(known: dict[str, Value], name: str, kind: str) -> Value:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    guess = f"did you mean `{near[0]}`? " if near else ""
    raise UsageError(f"there is no {kind} `{name}`", f"{guess}known: {', '.join(known)}")


def load_matrix(root: Path, user: Path | None = None) -> Matrix:
    """The matrix of a project, with the variants and the extension of a user's slipway.toml.

    Raises `MatrixError` with file, table and key when something is malformed.
    """
    path = root / "images" / "matrix.toml"
    user_file = read_user_file(user) if user else None
    with values_of(path):
        return read_matrix(root, path, read_toml(path), user_file)


def read_matrix(root: Path, path: Path, data: dict[str, Any], user: UserFile | None) -> Matrix:
    if data.get("schema") != 1:
        raise MatrixError(
            f"{path}: `schema` is {data.get('schema')!r}, not 1", "use the buildkit that belongs to this checkout"
        )
    bases = {name: read_base(name, table, path) for name, table in table_of(data, "bases", path).items()}
    shared = Shared(bases, table_of(data, "packages", path), data.get("source_only", {}))
    tables = table_of(data, "targets", path)
    targets = {name: read_target(name, table, shared, path, user) for name, table in tables.items()}
    layers = tuple(
        build(
            WheelLayer, {**table, "distributions": tuple(table.get("distributions", ()))}, path, f"wheel_layers {index}"
        )
        for index, table in enumerate(data.get("wheel_layers", []))
    )
    rocm = {release: tuple(names) for release, names in data.get("rocm_architectures", {}).items()}
    lists = {key: tuple(names) for key, names in data.get("debug", {}).items()}
    debuggers = build(Debuggers, lists, path, "debug")
    return Matrix(root, targets, layers or Matrix.wheel_layers, rocm, debuggers, user)


def read_base(name: str, table: dict[str, Any], path: Path) -> Base:
    base = build(Base, {"name": name, **table}, path, f"bases.{name}")
    if not GLIBC.fullmatch(base.glibc):
        raise MatrixError(
            f"{path}: bases.{name}: `glibc` is {base.glibc!r}", 'write what `ldd --version` says there, like "2.36"'
        )
    return base


@dataclass(frozen=True)
class Shared:
    """The tables of the matrix that all targets share."""

    bases: dict[str, Base]
    packages: dict[str, list[str]]
    source_only: dict[str, str]


def read_target(name: str, table: dict[str, Any], shared: Shared, path: Path, user: UserFile | None) -> Target:
    where = f"targets.{name}"
    if name not in ACCELERATORS:
        raise MatrixError(
            f"{path}: {where}: unknown accelerator `{name}`",
            f"add a row to buildkit/host/accelerators.py; known: {', '.join(ACCELERATORS)}",
        )
    tables = table_of(table, "variants", path, where)
    variants = {key: read_variant(name, key, entry, table, shared, path) for key, entry in tables.items()}
    if not variants:
        raise MatrixError(f"{path}: {where} has no variants", "add a [targets.<name>.variants.<variant>] table")
    if user:
        variants |= read_user_variants(name, variants, table, shared, user)
    rest = {key: value for key, value in table.items() if key not in ("variants", *SHARED, *MERGED)}
    return build(Target, {"name": name, "variants": variants, **rest}, path, where)


def read_user_variants(
    target: str, known: dict[str, Variant], table: dict[str, Any], shared: Shared, user: UserFile
) -> dict[str, Variant]:
    """The user's variants of a target. Raises `MatrixError` for one whose name the project has."""
    variants = {}
    for name, entry in user.variants.get(target, {}).items():
        if name in known:
            raise MatrixError(f"{user.path}: {target} already has a variant `{name}`", "give yours another name")
        with values_of(user.path):
            variants[name] = replace(read_variant(target, name, entry, table, shared, user.path), origin=user.path)
    return variants


def read_variant(
    target: str, name: str, entry: dict[str, Any], inherited: dict[str, Any], shared: Shared, path: Path
) -> Variant:
    """A variant from its table; `inherited` is that of its target. Raises `MatrixError`."""
    place = f"targets.{target}.variants.{name}"
    values = {key: inherited[key] for key in SHARED if key in inherited} | {"status": "untested"} | entry
    if (base := shared.bases.get(values.get("base", ""))) is None:
        known = ", ".join(shared.bases)
        raise MatrixError(f"{path}: {place}: `base` is {values.get('base')!r}", f"name one of: {known}")
    if values["status"] not in STATUSES:
        raise MatrixError(f"{path}: {place}: `status` is {values['status']!r}", f"one of: {', '.join(STATUSES)}")
    packages = {*shared.packages.get("common", []), *shared.packages.get(target, []), *entry.get("packages", ())}
    for handled in ("without_packages", "keep"):
        values.pop(handled, None)
    left_out = {"exclude": inherited.get("exclude", {}), "prune": inherited.get("prune", {})}
    values |= read_left_out(left_out | {"source_only": shared.source_only}, entry, path, place)
    indexes = inherited.get("indexes", {}) | entry.get("indexes", {})
    values |= {
        "target": target,
        "name": name,
        "base": base,
        "packages": tuple(sorted(packages - set(entry.get("without_packages", ())))),
        "indexes": read_indexes(indexes, path, place),
        "requirements": (*inherited.get("requirements", ()), *entry.get("requirements", ())),
        "architectures": tuple(values.get("architectures", ())),
    }
    return build(Variant, values, path, place)


def read_left_out(
    shared: dict[str, dict[str, str]], entry: dict[str, Any], path: Path, place: str
) -> dict[str, dict[str, str]]:
    """Files and wheels that a variant omits: the shared ones, except those in its `keep`, and its own.

    Raises `MatrixError` when `keep` names what nothing leaves out.
    """
    keep = entry.get("keep", {})
    if unknown := sorted(set(keep) - {name for reasons in shared.values() for name in reasons}):
        raise MatrixError(
            f"{path}: {place}.keep: nothing leaves out `{unknown[0]}`",
            "write a name as it stands in the target's `exclude` or `prune`, or in `source_only`",
        )
    return {
        kind: {name: reason for name, reason in reasons.items() if name not in keep} | entry.get(kind, {})
        for kind, reasons in shared.items()
    }


def read_indexes(tables: dict[str, Any], path: Path, place: str) -> dict[str, VendorIndex]:
    """Raises `MatrixError` for an address that is not public."""
    indexes = {}
    for address, table in tables.items():
        where = f"{place}.indexes.{without_password(address)}"
        if not address.startswith("https://") or "@" in address:
            raise MatrixError(f"{path}: {where}: not a public index", "name it by https:// and without a password")
        indexes[address] = build(VendorIndex, {**table, "only": tuple(table.get("only", ()))}, path, where)
    return indexes
