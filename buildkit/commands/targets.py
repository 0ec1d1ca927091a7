"""The command `targets`."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from buildkit.certification.contributed import Contributed, of_variant, read_certificates
from buildkit.commands.options import AsJson, Project, emit, errors, open_matrix, table_console
from buildkit.images.build import cache_folder
from buildkit.images.plan import last_build
from buildkit.recipe.lock_file import find_lock
from buildkit.recipe.matrix import Matrix, Variant


def targets(as_json: AsJson = False, project: Project = None) -> None:
    """List targets and variants with their pins and status: proven, untested, or certified on somebody's machine."""
    matrix = open_matrix(project)
    certificates = read_certificates(matrix)
    variants = listed(matrix, certificates)
    if as_json:
        emit(
            [
                describe(variant)
                | describe_lock(matrix, variant)
                | {"certificates": [describe_certificate(entry) for entry in of_variant(certificates, variant)]}
                for variant in variants
            ]
        )
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("target", "variant", "status", "lock", "pins"):
        table.add_column(column, overflow="fold")
    for variant in variants:
        status = shown_status(variant, of_variant(certificates, variant))
        lock = shown_lock(describe_lock(matrix, variant))
        table.add_row(variant.target, variant.name, escape(status), lock, escape(" ".join(variant.requirements)))
    table_console(200).print(table)
    for entry in certificates:
        if entry.problem:
            errors.print(escape(f"{entry.path.name} does not count: {entry.problem}"))


def listed(matrix: Matrix, certificates: list[Contributed]) -> list[Variant]:
    """The matrix's variants, and those with debuggers or for another platform that have a certificate."""
    variants = [variant for target in matrix.targets.values() for variant in target.variants.values()]
    for entry in certificates:
        if entry.certificate and not entry.problem:
            variant = matrix.variant(entry.certificate.target, entry.certificate.variant)
            if variant.identifier not in {known.identifier for known in variants}:
                variants.append(variant)
    return variants


def shown_status(variant: Variant, certificates: list[Contributed]) -> str:
    """A certificate takes the place of `untested`; the newest one with the current lock comes first."""
    counted = [entry for entry in certificates if not entry.problem]
    status = f"{variant.status}, {variant.proof}" if variant.proof else variant.status
    if counted and variant.status == "untested":
        status = counted[0].summary
    return status if variant.trains else f"cannot train; {status}"


def describe(variant: Variant) -> dict[str, Any]:
    return {
        "target": variant.target,
        "variant": variant.name,
        "status": variant.image_status,
        "proof": "" if variant.extension else variant.proof,
        "trains": variant.trains,
        "base": variant.base.image,
        "python": variant.base.python,
        "pins": list(variant.requirements),
    }


def describe_lock(matrix: Matrix, variant: Variant) -> dict[str, Any]:
    """The day of the lock, its age in days, and how the base of the image that was built here differs from it."""
    lock, built = find_lock(matrix, variant), last_build(variant, cache_folder())
    if not lock.text:
        return {"locked": None, "lock_age_days": None, "base_changes": []}
    day = datetime.fromtimestamp(lock.epoch, UTC).date()
    changes = list(built.changes) if built.lock == lock.digest else []
    age = (datetime.now(UTC).date() - day).days
    return {"locked": day.isoformat(), "lock_age_days": age, "base_changes": changes}


def shown_lock(lock: dict[str, Any]) -> str:
    if lock["locked"] is None:
        return "none"
    age = {0: "today", 1: "1 day old"}.get(lock["lock_age_days"], f"{lock['lock_age_days']} days old")
    changed = "; the image here has a newer base" if lock["base_changes"] else ""
    return f"{age}{changed}"


def describe_certificate(entry: Contributed) -> dict[str, Any]:
    """`problem` is empty if it counts; `current`: it is about the present lock."""
    return {
        "file": entry.path.name,
        "problem": entry.problem,
        "signer": entry.signer,
        "current": entry.current,
        **(asdict(entry.certificate) if entry.certificate else {}),
    }
