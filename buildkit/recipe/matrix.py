"""Reads and validates `images/matrix.toml` and `images/env/*.toml`."""

import difflib
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from buildkit.errors import MatrixError, UsageError
from buildkit.host.accelerators import ACCELERATORS
from buildkit.host.settings import without_password
from buildkit.recipe.environment import EnvEntry, parse_environment
from buildkit.recipe.platform import AMD64, ARM64, Platform, host_platform

STATUSES = ("proven", "untested")
DEBUG_SUFFIX = "-debug"
GLIBC = re.compile(r"2\.\d{1,3}")
Value = TypeVar("Value")


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
    image.
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

    @property
    def identifier(self) -> str:
        return f"{self.target}-{self.name}"

    def for_platform(self, platform: Platform) -> "Variant":
        """The same variant for another platform, with a name of its own, because what is proven holds for one."""
        if platform == self.platform:
            return self
        return replace(self, name=self.name + platform.suffix, platform=platform, status="untested", proof="")

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
    """`wheel_layers` in the order in which they are laid down; `rocm_architectures` by ROCm release."""

    root: Path
    targets: dict[str, Target]
    wheel_layers: tuple[WheelLayer, ...] = (WheelLayer("wheels", ("*",)),)
    rocm_architectures: dict[str, tuple[str, ...]] = field(default_factory=dict)
    debuggers: Debuggers = Debuggers()

    @property
    def images(self) -> Path:
        return self.root / "images"

    def variant(
        self, target: str, variant: str | None = None, with_debug: bool = False, platform: Platform | None = None
    ) -> Variant:
        """The named variant, or the target's default, for this host's platform or the given one.

        A name may end in `-arm64` for that platform, and then in `-debug` for the debuggers.

        Raises `UsageError` with the nearest match for an unknown target or variant.
        """
        found = pick(self.targets, target, "target")
        name = (variant or found.default.name).removesuffix(DEBUG_SUFFIX)
        if name.endswith(ARM64.suffix):
            name, platform = name.removesuffix(ARM64.suffix), ARM64
        chosen = pick(found.variants, name, f"variant of {target}").for_platform(platform or host_platform())
        return self.debuggers.added_to(chosen) if with_debug or (variant or "").endswith(DEBUG_SUFFIX) else chosen

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


def load_matrix(root: Path) -> Matrix:
    """The matrix of a project. Raises `MatrixError` with file, table and key when something is malformed."""
    path = root / "images" / "matrix.toml"
    try:
        return read_matrix(root, path, read_toml(path))
    except (AttributeError, TypeError, ValueError) as error:
        raise MatrixError(
            f"{path}: a value has the wrong type: {error}", "compare it with its neighbours in the same file"
        ) from error


def read_matrix(root: Path, path: Path, data: dict[str, Any]) -> Matrix:
    if data.get("schema") != 1:
        raise MatrixError(
            f"{path}: `schema` is {data.get('schema')!r}, not 1", "use the buildkit that belongs to this checkout"
        )
    bases = {name: read_base(name, table, path) for name, table in table_of(data, "bases", path).items()}
    packages = table_of(data, "packages", path)
    source_only = data.get("source_only", {})
    targets = {
        name: read_target(name, table, bases, packages, source_only, path)
        for name, table in table_of(data, "targets", path).items()
    }
    layers = tuple(
        build(
            WheelLayer, {**table, "distributions": tuple(table.get("distributions", ()))}, path, f"wheel_layers {index}"
        )
        for index, table in enumerate(data.get("wheel_layers", []))
    )
    rocm = {release: tuple(names) for release, names in data.get("rocm_architectures", {}).items()}
    lists = {key: tuple(names) for key, names in data.get("debug", {}).items()}
    debuggers = build(Debuggers, lists, path, "debug")
    return Matrix(root, targets, layers or Matrix.wheel_layers, rocm, debuggers)


def read_base(name: str, table: dict[str, Any], path: Path) -> Base:
    base = build(Base, {"name": name, **table}, path, f"bases.{name}")
    if not GLIBC.fullmatch(base.glibc):
        raise MatrixError(
            f"{path}: bases.{name}: `glibc` is {base.glibc!r}", 'write what `ldd --version` says there, like "2.36"'
        )
    return base


def read_target(
    name: str,
    table: dict[str, Any],
    bases: dict[str, Base],
    packages: dict[str, list[str]],
    source_only: dict[str, str],
    path: Path,
) -> Target:
    where = f"targets.{name}"
    if name not in ACCELERATORS:
        raise MatrixError(
            f"{path}: {where}: buildkit knows no accelerator `{name}`",
            f"add a row to buildkit/host/accelerators.py; known: {', '.join(ACCELERATORS)}",
        )
    apt = tuple(sorted({*packages.get("common", []), *packages.get(name, [])}))
    variants = {}
    for key, entry in table_of(table, "variants", path, where).items():
        base = bases.get(entry.get("base", ""))
        place = f"{where}.variants.{key}"
        if base is None:
            raise MatrixError(f"{path}: {place}: `base` is {entry.get('base')!r}", f"name one of: {', '.join(bases)}")
        if entry.get("status") not in STATUSES:
            raise MatrixError(f"{path}: {place}: `status` is {entry.get('status')!r}", f"one of: {', '.join(STATUSES)}")
        own = tuple(sorted({*apt, *entry.get("packages", ())} - set(entry.get("without_packages", ()))))
        values = {**entry, "target": name, "name": key, "base": base, "packages": own}
        for handled in ("without_packages", "keep"):
            values.pop(handled, None)
        shared = {"exclude": table.get("exclude", {}), "prune": table.get("prune", {}), "source_only": source_only}
        values |= read_left_out(shared, entry, path, place)
        values["indexes"] = read_indexes(entry.get("indexes", {}), path, place)
        values["requirements"] = tuple(entry.get("requirements", ()))
        values["architectures"] = tuple(entry.get("architectures", ()))
        variants[key] = build(Variant, values, path, place)
    if not variants:
        raise MatrixError(f"{path}: {where} has no variants", "add a [targets.<name>.variants.<variant>] table")
    rest = {key: value for key, value in table.items() if key not in ("variants", "exclude", "prune")}
    return build(Target, {"name": name, "variants": variants, **rest}, path, where)


def read_left_out(
    shared: dict[str, dict[str, str]], entry: dict[str, Any], path: Path, place: str
) -> dict[str, dict[str, str]]:
    """What a variant leaves out: what it shares with others, without what its `keep` names, and its own.

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
    found = {}
    for address, table in tables.items():
        where = f"{place}.indexes.{without_password(address)}"
        if not address.startswith("https://") or "@" in address:
            raise MatrixError(f"{path}: {where}: not a public index", "name it by https:// and without a password")
        found[address] = build(VendorIndex, {**table, "only": tuple(table.get("only", ()))}, path, where)
    return found


def build(kind: type[Value], values: dict[str, Any], path: Path, where: str) -> Value:
    """A data class from a TOML table. Raises `MatrixError` for a missing or unknown key."""
    try:
        return kind(**values)
    except TypeError as error:
        detail = str(error).split("__init__() ")[-1]
        raise MatrixError(f"{path}: {where}: {detail}", "compare it with its neighbours in the same file") from error


def table_of(data: dict[str, Any], key: str, path: Path, where: str = "") -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise MatrixError(
            f"{path}: no table `{key}`{f' in {where}' if where else ''}", "compare it with the repository's own"
        )
    return value


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MatrixError(f"{path} is missing", "run from a Slipway checkout, or name it with --project") from None
    except OSError as error:
        raise MatrixError(f"{path} cannot be read: {error.strerror}", "make it a readable file") from error
    except ValueError as error:  # TOMLDecodeError, text in another encoding, a number of thousands of digits
        raise MatrixError(f"{path}: {error}", "correct the TOML there") from error
