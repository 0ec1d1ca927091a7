"""A project whose image builds within seconds: the base of the real cpu image, and stand-ins for wheels.

`buildkit`, the container engine, mmdebstrap and uv are real. The wheels hold random bytes: a build with new ones
downloads them. The base comes from the cache of `buildkit build`, which makes it if it is not there.
"""

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from buildkit.images.build import cache_folder
from buildkit.recipe.lock import Lock, WheelFacts, format_lock, parse_pins
from buildkit.recipe.lock_file import find_lock, inputs_digest, template_digest
from buildkit.recipe.matrix import load_matrix
from tests.buildkit.stand_ins import StandIn, write_wheel

ROOT = Path(__file__).parents[2]
WHEELS = tuple(
    StandIn(name, "1", "py3-none-any", libraries=(f"{name}/content.bin",)) for name in ("ballast", "cargo", "stone")
)
MATRIX = """
schema = 1
[bases.debian12]
image = "debian:bookworm-slim"
glibc = "2.36"
python = "3.11"
bootstrap = {{ suite = "bookworm", variant = "minbase" }}
[packages]
common = {packages}
[targets.cpu]
disk_gib = 1
summary = "test"
[targets.cpu.variants.not-built] # the default would get the tag slipway:cpu
base = "debian12"
status = "untested"
[targets.cpu.variants.{variant}]
base = "debian12"
status = "untested"
requirements = {requirements}
"""
PYPROJECT = '[project]\nname = "small"\nversion = "1.2.3"\n[project.optional-dependencies]\nimage = []\n'


class SmallProject:
    """The project in a folder; its image is `slipway:cpu-VARIANT` with a variant of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.wheels, self.cache = root / "project", root / "wheels", root / "cache"
        self.variant = f"small-{secrets.token_hex(3)}"
        images, real = self.root / "images", load_matrix(ROOT)
        self._base = find_lock(real, real.variant("cpu"))
        (images / "env").mkdir(parents=True)
        self.wheels.mkdir()
        pins = [f"{wheel.name}=={wheel.version}" for wheel in WHEELS]
        packages, requirements = json.dumps(real.variant("cpu").packages), json.dumps(pins)
        matrix = MATRIX.format(variant=self.variant, packages=packages, requirements=requirements)
        (images / "matrix.toml").write_text(matrix)
        (self.root / "pyproject.toml").write_text(PYPROJECT)
        for name in ("common", "cpu"):
            (images / "env" / f"{name}.toml").write_text("")
        for name in ("images/templates", "images/aliases", "images/chips.toml", "entrypoints", "trainer"):
            (self.root / name).symlink_to(ROOT / name)
        (cache_folder() / "bases").mkdir(parents=True, exist_ok=True)
        (self.cache / "slipway").mkdir(parents=True)
        (self.cache / "slipway" / "bases").symlink_to(cache_folder() / "bases")

    @property
    def tag(self) -> str:
        return f"slipway:cpu-{self.variant}"

    def move_mirror(self, package: str) -> str:
        """Locks a version of the package that no mirror and no archive has, as if the mirror had moved on to its own.

        The base is made in a cache of this project. Returns that version.
        """
        gone = "0~gone"
        debs = [replace(deb, version=gone) if deb.name == package else deb for deb in self._base.debs]
        self._base = replace(self._base, debs=tuple(debs))
        (self.cache / "slipway" / "bases").unlink()
        return gone

    def write_wheels(self, content: Mapping[str, bytes]) -> None:
        """New wheels with these contents, by name, and a lock with their digests."""
        pins = ""
        for wheel in WHEELS:
            write_wheel(wheel, self.wheels, content[wheel.name])
            digest = hashlib.sha256((self.wheels / wheel.filename).read_bytes()).hexdigest()
            pins += f"{wheel.name}=={wheel.version} \\\n    --hash=sha256:{digest}\n"
        matrix = load_matrix(self.root)
        variant = matrix.variant("cpu", self.variant)
        lock = Lock(
            inputs=inputs_digest(matrix, variant),
            template=template_digest(matrix, variant),
            epoch=self._base.epoch,
            base=self._base.base,
            base_bytes=self._base.base_bytes,
            debs=self._base.debs,
            wheels={name: WheelFacts(name, len(data), 0) for name, data in content.items()},
            pins=parse_pins(pins),
        )
        path = self.root / "images" / "locks" / "cpu" / f"{self.variant}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(format_lock(lock, variant.identifier))

    def buildkit(
        self, command: str, index: str, settings: Mapping[str, str] | None = None, options: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """`buildkit COMMAND` of the variant, with packages from this index alone."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        environment = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "PIP_CONFIG_FILE": os.devnull,
            "XDG_CONFIG_HOME": str(self.root / "config"),
            "XDG_CACHE_HOME": str(self.cache),
            **{"UV_DEFAULT_INDEX": index, **(settings or {})},
        }
        words = [command, "--project", str(self.root)]
        words += ["--target", "cpu", "--variant", self.variant] if command != "targets" else []
        words += ["--progress", "plain"] if command == "build" else []
        words += options
        return subprocess.run(
            [sys.executable, "-m", "buildkit", *words], env=environment, capture_output=True, text=True, check=False
        )

    def image_id(self) -> str | None:
        """The id of the tagged image; None if there is none."""
        done = docker("image", "inspect", "--format", "{{.Id}}", self.tag)
        return done.stdout.strip() if done.returncode == 0 else None

    def images(self) -> list[str]:
        """The ids of all images that this project built."""
        return docker("images", "--quiet", "--filter", f"reference={self.tag}*").stdout.split()

    def remove(self) -> None:
        for name in self.images():
            docker("rmi", "--force", name)
        shutil.rmtree(self.root.parent)


def random_content(size: int) -> dict[str, bytes]:
    """A content of each wheel that no build has seen."""
    return {wheel.name: os.urandom(size) for wheel in WHEELS}


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)


def docker_bytes(*arguments: str) -> bytes:
    return subprocess.run(["docker", *arguments], capture_output=True, check=True).stdout


def gateway() -> str:
    """The address of this host that both `buildkit` and the containers of a build reach."""
    done = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    return done.stdout.strip()
