"""A base from a registry is locked and pulled by its digest; Debian packages and wheels are added.

The registry (Debian's docker-registry, on loopback) and the base in it are real; the variant has few wheels.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.errors import LockError, RegistryError
from buildkit.host.settings import read_host
from buildkit.images.build import BuildOptions, build_image, cache_folder
from buildkit.recipe.lock import Deb, format_lock
from buildkit.recipe.lock_file import lock_path, read_lock
from buildkit.recipe.matrix import Matrix, load_matrix
from buildkit.running.engine import Docker
from buildkit.supply.resolve import write_lock
from tests.engines.conftest import ROOT
from tests.publish.conftest import Server

pytestmark = pytest.mark.timeout(600)

COPIED = ("buildkit", "entrypoints", "images", "trainer", "pyproject.toml")
SMALL = """
[bases.local]
image = "{image}"
glibc = "2.36"
python = "3.11"

[targets.cpu.variants.small]
base = "local"
status = "untested"
requirements = ["packaging"]
"""


@pytest.fixture
def base(server: Server, tmp_path: Path) -> Iterator[str]:
    """The reference of a slim Debian that only the registry has."""
    reference, tar = f"{server.host}/debian:bookworm-slim", tmp_path / "base.tar"
    run("mmdebstrap", "--quiet", "--variant=minbase", "bookworm", str(tar))
    run("docker", "import", str(tar), reference)
    run("docker", "push", "--quiet", reference)
    run("docker", "rmi", reference)
    yield reference
    for name in run("docker", "images", "--quiet", "--filter", "reference=slipway:cpu-small*").split():
        subprocess.run(["docker", "rmi", "--force", name], check=False, capture_output=True)


@pytest.fixture
def matrix(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Matrix:
    """The project with a small variant on that base, and caches of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "project"
    root.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, root / name)
    with (root / "images" / "matrix.toml").open("a") as text:
        text.write(SMALL.format(image=base))
    project = (root / "pyproject.toml").read_text()
    small = re.sub(r"^image = \[.*?^\]", 'image = ["rich", "typer"]', project, flags=re.MULTILINE | re.DOTALL)
    (root / "pyproject.toml").write_text(small)
    return load_matrix(root)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"
    return done.stdout


def test_an_image_is_built_on_the_locked_digest(matrix: Matrix, base: str, server: Server) -> None:
    variant = matrix.variant("cpu", "small")
    write_lock(matrix, variant, read_host(), cache_folder())
    lock = read_lock(matrix, variant)
    assert server.blob_path(lock.base_digest).is_file()
    assert not lock.debs

    result = build_image(matrix, variant, Docker(), BuildOptions(progress="plain"))
    assert result.base_provider == "registry"
    name = result.tags[0]
    assert "libibverbs" in run("docker", "run", "--rm", name, "--no-ray", "--", "dpkg", "--status", "libibverbs1")
    assert lock.base_digest in run("docker", "run", "--rm", "--entrypoint", "cat", name, "/etc/slipway/image.json")

    stale = (Deb("tini", "0~gone", "0" * 64),)
    lock_path(matrix, variant).write_text(format_lock(replace(lock, debs=stale), variant.identifier))
    with pytest.raises(LockError, match=r"moved on from the lock of cpu-small: .*tini 0~gone -> 0\."):
        build_image(matrix, variant, Docker(), BuildOptions(progress="plain", only_locked=True))
    newer = build_image(matrix, variant, Docker(), BuildOptions(progress="plain"))
    changes = {change.package: change for change in newer.base_changes}
    assert changes["tini"].locked == "0~gone"
    assert changes["libibverbs1"].locked == "", "what a package brings along is not locked either"
    assert "apt" not in changes, "the public image's own packages come by its digest"
    exact = tuple(Deb(name, change.installed, "0" * 64) for name, change in changes.items())
    lock_path(matrix, variant).write_text(format_lock(replace(lock, debs=exact), variant.identifier))
    assert build_image(matrix, variant, Docker(), BuildOptions(progress="plain", only_locked=True)).base_changes == ()
    lock_path(matrix, variant).write_text(lock.text)

    server.kill()
    with pytest.raises(RegistryError, match="did not answer"):
        write_lock(matrix, variant, read_host(), cache_folder(), upgrade=True)
    assert read_lock(matrix, variant) == lock
