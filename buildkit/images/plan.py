"""Plans a build: its layers with their sizes and cache keys, and whether the pins are compatible.

A plan reads only the lock and needs neither network nor engine. Sources: the wheels' own metadata
(https://packaging.python.org/specifications/core-metadata/), NVIDIA's CUDA release notes, AMD's compatibility matrix.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from buildkit.errors import MatrixError
from buildkit.host.accelerators import ACCELERATORS
from buildkit.recipe.dockerfile import render_dockerfile
from buildkit.recipe.extension import LockedExtension
from buildkit.recipe.lock import Lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.recipe.wheel_layers import layer_of, layer_requirements

COLLECTIVES = "|".join(row.collectives for row in ACCELERATORS.values() if row.collectives)
TOOLKIT_PART = re.compile(r"nvidia-(cuda-.+|nvvm|nvjitlink|nvtx|nvfatbin|nvptxcompiler)(-cu\d+)?")
COMPILER = {"nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-nvvm"}  # what compiling needs
SYSTEM = 2**20  # bytes of an empty virtual environment
CODE = ("entrypoints", "trainer")
CHIPS = "images/chips.toml"  # which both read


@dataclass(frozen=True)
class Layer:
    """`bytes` are uncompressed; `key` changes exactly when the layer must be built again."""

    name: str
    bytes: int
    key: str


@dataclass(frozen=True)
class PlanCheck:
    """`status` is ok, warn or fail."""

    name: str
    status: str
    detail: str


@dataclass(frozen=True)
class Plan:
    """`changed` names the layers that differ from the last build on this host."""

    target: str
    variant: str
    layers: tuple[Layer, ...]
    checks: tuple[PlanCheck, ...]
    changed: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)


def make_plan(
    matrix: Matrix, variant: Variant, lock: Lock, cache: Path, extension: LockedExtension | None = None
) -> Plan:
    """The plan of a build from this lock."""
    layers = tuple(plan_layers(matrix, variant, lock, extension))
    if extension:
        lock = lock.extended_by(extension.lock)
    built = last_build(variant, cache)
    return Plan(
        variant.target,
        variant.name,
        layers,
        tuple(check(matrix, variant, lock) for check in CHECKS),
        tuple(layer.name for layer in layers if built.layers.get(layer.name) != layer.key),
    )


@dataclass(frozen=True)
class LastBuild:
    """The last build of a variant on this host: the keys of its layers, the lock's digest, and how the base differs
    from that lock."""

    layers: dict[str, str] = field(default_factory=dict)
    lock: str = ""
    changes: tuple[str, ...] = ()


def record_build(plan: Plan, lock: Lock, cache: Path) -> None:
    """Stores what `last_build` reads."""
    path = record_path(plan.target, plan.variant, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    built = LastBuild({layer.name: layer.key for layer in plan.layers}, lock.digest, tuple(map(str, lock.changes)))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(built)))
    partial.replace(path)


def last_build(variant: Variant, cache: Path) -> LastBuild:
    """The record of the last build; an empty one when there is none that can be read."""
    try:
        record = json.loads(record_path(variant.target, variant.name, cache).read_text())
        layers = {str(name): str(key) for name, key in record["layers"].items()}
        return LastBuild(layers, str(record["lock"]), tuple(map(str, record["changes"])))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return LastBuild()


def record_path(target: str, variant: str, cache: Path) -> Path:
    return cache / "builds" / f"{target}-{variant}.json"


# ---- layers ----


def plan_layers(
    matrix: Matrix, variant: Variant, lock: Lock, extension: LockedExtension | None = None
) -> Iterator[Layer]:
    key = digest(lock.base, lock.base_digest, *map(str, lock.debs), *variant.packages, str(lock.epoch))
    yield Layer("base", lock.base_bytes, key)
    sizes: dict[str, int] = defaultdict(int)
    for wheel in lock.wheels.values():
        sizes[layer_of(wheel.name, matrix.wheel_layers)] += wheel.installed_bytes
    installer = (matrix.images / "templates" / "install-wheels").read_text() + "\n".join(
        [*variant.prune, *variant.source_only]
    )
    sizes[matrix.wheel_layers[0].name] += SYSTEM
    for name, requirements in layer_requirements(lock.pins, matrix.wheel_layers).items():
        key = digest(key, requirements, installer)
        yield Layer(name, sizes[name], key)
    size, content = code_content(matrix.root)
    settings = render_dockerfile(matrix, variant, variant.base.providers[-1], {}).partition("\nENV ")[2]
    key = digest(key, content, settings)
    yield Layer("code", size, key)
    if extension:
        yield Layer("extension", extension.bytes, digest(key, extension.digest))


def code_content(root: Path) -> tuple[int, str]:
    """Size in bytes and digest of the code that goes into the image. Raises `MatrixError` if a part is missing."""
    require_code(root)
    folders = [*(root / package for package in CODE), root / "images" / "aliases"]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [*(path for path in files if "__pycache__" not in path.parts), root / CHIPS]
    contents = [path.read_bytes() for path in files]
    names = [str(path.relative_to(root)) for path in files]
    return sum(map(len, contents)), digest(*names, *(hashlib.sha256(content).hexdigest() for content in contents))


def require_code(root: Path) -> None:
    """Raises `MatrixError` for a project without a part of the code that goes into images, such as an older commit."""
    missing = [name for name in (*CODE, CHIPS) if not (root / name).exists()]
    if missing:
        raise MatrixError(
            f"{root} has no {', no '.join(missing)}, which this buildkit puts into images",
            "name a Slipway checkout of this release, or run the buildkit of that checkout",
        )


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# ---- checks ----


def check_python(_matrix: Matrix, variant: Variant, lock: Lock) -> PlanCheck:
    python = variant.base.python
    refusing = [
        f"{wheel.name} needs Python {wheel.requires_python}"
        for wheel in lock.wheels.values()
        if wheel.requires_python and not SpecifierSet(wheel.requires_python).contains(f"{python}.0")
    ]
    return verdict("python", refusing, f"every wheel accepts {python}")


def check_dependencies(_matrix: Matrix, variant: Variant, lock: Lock) -> PlanCheck:
    """Whether the pins satisfy what torch, vLLM, Ray and Transformers require."""
    left_out = {canonicalize_name(name) for name in variant.exclude}
    broken, satisfied, locked = [], 0, lock.versions
    for wheel in lock.wheels.values():
        for text in wheel.requires:
            requirement = Requirement(text)
            if not variant.applies(requirement) or canonicalize_name(requirement.name) in left_out:
                continue
            version = locked.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                broken.append(
                    f"{wheel.name} needs {requirement.name}{requirement.specifier}, locked: {version or 'none'}"
                )
            satisfied += 1
    return verdict("dependencies", broken, f"{satisfied} requirements of the main packages are satisfied")


def check_glibc(_matrix: Matrix, variant: Variant, lock: Lock) -> PlanCheck:
    """Whether the wheels' libraries load with the base's C library: the locked one, else the matrix's."""
    locked = [match[0] for deb in lock.debs if deb.name == "libc6" and (match := re.match(r"\d+\.\d+", deb.version))]
    present = locked[0] if locked else variant.base.glibc
    wrong = [
        f"{wheel.name} needs glibc {wheel.glibc}, base {variant.base.name} has {present}"
        for wheel in lock.wheels.values()
        if wheel.glibc and Version(wheel.glibc) > Version(present)
    ]
    if present != variant.base.glibc:
        wrong.append(f"images/matrix.toml says glibc {variant.base.glibc}, the locked base has {present}")
    return verdict("glibc", wrong, f"every library loads with {present}")


def check_collectives(_matrix: Matrix, _variant: Variant, lock: Lock) -> PlanCheck:
    owners = owners_of(lock, re.compile(rf"lib({COLLECTIVES})\.so"))
    several = [f"NCCL is in several wheels: {', '.join(sorted(owners))}"] if len(owners) > 1 else []
    return verdict("one NCCL or RCCL", several, f"in {next(iter(owners))}" if owners else "none among the wheels")


def check_cuda(_matrix: Matrix, _variant: Variant, lock: Lock) -> PlanCheck:
    majors = cuda_majors(lock)
    several = [f"wheels of several CUDA majors: {', '.join(sorted(majors))}"] if len(majors) > 1 else []
    return verdict("one CUDA major", several, f"CUDA {next(iter(majors))}" if majors else "no CUDA among the wheels")


def check_toolkit(_matrix: Matrix, _variant: Variant, lock: Lock) -> PlanCheck:
    """Whether CUDA's compiler, headers and libraries are of the release that torch runs with, to the minor version:
    nvcc refuses the headers of another. The linker nvJitLink alone may be newer, as NVIDIA's own requirements say."""
    parts = {name: Version(version) for name, version in lock.versions.items() if TOOLKIT_PART.fullmatch(name)}
    runtime = next((version for name, version in parts.items() if "-runtime" in name), None)
    if runtime is None:
        return PlanCheck("CUDA toolkit", "ok", "no CUDA among the wheels")
    release = runtime.release[:2]
    wrong = [
        f"{name} {version} is not of CUDA {runtime.major}.{runtime.minor}"
        for name, version in sorted(parts.items())
        if version.release[:2] != release
        and not ("nvjitlink" in name and version.major == runtime.major and version > runtime)
    ]
    present = {name.removesuffix(f"-cu{runtime.major}") for name in parts}
    if not wrong and (missing := sorted(COMPILER - present)):
        detail = f"{', '.join(missing)} missing: FlashInfer and extensions of torch compile no kernels"
        return PlanCheck("CUDA toolkit", "warn", detail)
    return verdict("CUDA toolkit", wrong, f"compiler, headers and libraries of CUDA {runtime.major}.{runtime.minor}")


def check_driver(_matrix: Matrix, variant: Variant, lock: Lock) -> PlanCheck:
    oldest = ACCELERATORS["cuda"].oldest_driver
    needed = [oldest[major] for major in cuda_majors(lock) if major in oldest]
    wrong = [
        f"the variant says driver {variant.driver or 'none'}, its CUDA needs {driver}"
        for driver in needed
        if not variant.driver or Version(variant.driver) < Version(driver)
    ]
    return verdict("driver", wrong, f"{variant.driver} or newer" if variant.driver else "none needed")


def check_architectures(_matrix: Matrix, variant: Variant, lock: Lock) -> PlanCheck:
    """Whether the wheels that hold GPU code hold it for each of the variant's architectures, where that is known."""
    runs_on = ACCELERATORS[variant.target].code_runs_on
    wanted = variant.architectures if runs_on else ()
    missing = [
        f"{wheel.name} has no code for {name} (has {', '.join(wheel.architectures)})"
        for wheel in lock.wheels.values()
        for name in wanted
        if runs_on and wheel.architectures and not any(runs_on(has, name) for has in wheel.architectures)
    ]
    return verdict("GPU architectures", missing, ", ".join(wanted) or "none asked for")


def check_rocm(matrix: Matrix, variant: Variant, _lock: Lock) -> PlanCheck:
    if not variant.rocm:
        return PlanCheck("ROCm", "ok", "none in this variant")
    supported = matrix.rocm_architectures.get(variant.rocm, ())
    if not supported:
        return PlanCheck("ROCm", "warn", f"no list of architectures for ROCm {variant.rocm} in images/matrix.toml")
    wrong = [f"ROCm {variant.rocm} does not support {name}" for name in variant.architectures if name not in supported]
    return verdict("ROCm", wrong, f"{variant.rocm} supports {', '.join(variant.architectures)}")


def cuda_majors(lock: Lock) -> set[str]:
    return {
        library.rpartition(".")[2]
        for wheel in lock.wheels.values()
        for library in wheel.libraries
        if "cudart" in library
    }


def owners_of(lock: Lock, library: re.Pattern[str]) -> set[str]:
    return {wheel.name for wheel in lock.wheels.values() for name in wheel.libraries if library.match(name)}


def verdict(name: str, problems: list[str], fine: str) -> PlanCheck:
    return PlanCheck(name, "fail", "; ".join(problems)) if problems else PlanCheck(name, "ok", fine)


CHECKS: tuple[Callable[[Matrix, Variant, Lock], PlanCheck], ...] = (
    check_python,
    check_dependencies,
    check_glibc,
    check_collectives,
    check_cuda,
    check_toolkit,
    check_driver,
    check_architectures,
    check_rocm,
)
