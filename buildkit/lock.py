"""One lock per variant: hashed requirements, without the address of any index, so that every mirror can serve them."""

import hashlib
import os
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

from uv import find_uv_bin

from buildkit.errors import LockError
from buildkit.host import HostSettings
from buildkit.matrix import Matrix, Variant

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
    text = "\n".join([variant.base.python, *sorted(inputs(matrix, variant)), *sorted(variant.exclude)])
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
    return text


def lock_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_lock(matrix: Matrix, variant: Variant, host: HostSettings) -> Path:
    """Resolves the variant with uv and replaces its lock; on any failure the old lock stays as it was."""
    path = lock_path(matrix, variant)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slipway-lock-") as folder:
        requirements = Path(folder, "requirements.in")
        requirements.write_text("\n".join(inputs(matrix, variant)) + "\n")
        # A marker that is never true removes a distribution from the resolution.
        overrides = Path(folder, "overrides.txt")
        overrides.write_text("".join(f"{name} ; python_version < '3'\n" for name in variant.exclude))
        output = Path(folder, "lock.txt")
        resolve(requirements, overrides, output, variant, host)
        text = (
            f"# Lock of {variant.identifier}, made by `buildkit lock`; not edited by hand.\n"
            f"# inputs: sha256:{inputs_digest(matrix, variant)}\n{output.read_text()}"
        )
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)
    return path


def resolve(requirements: Path, overrides: Path, output: Path, variant: Variant, host: HostSettings) -> None:
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
