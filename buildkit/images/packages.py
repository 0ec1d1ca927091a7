"""Debian packages that a user adds: apt chooses and downloads them in the image's base, before the image is built.

Their files stay in the cache by their sha256, so that a mirror may move on between two builds.
"""

import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from buildkit.errors import BuildError, ExtensionError
from buildkit.host.files import link
from buildkit.host.settings import HostSettings
from buildkit.images.secrets import write_secrets
from buildkit.recipe.dockerfile import render_packages
from buildkit.recipe.lock import Deb, Lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.running.engine import BuildRequest, ContainerEngine
from buildkit.supply.base import bootstrap, preferences
from buildkit.supply.wheels import sha256


class MirrorMovedError(Exception):
    """The mirror no longer has a locked package, or has another file under its version."""


class AptError(Exception):
    """apt's reason, in its own words."""


@dataclass(frozen=True)
class PackageSource:
    """apt in the base of a variant's image. `parent` is the base's provider, or an image that is extended.

    Where the mirror has moved on from the base's lock, `only_locked` refuses a newer base.
    """

    matrix: Matrix
    variant: Variant
    lock: Lock
    engine: ContainerEngine
    host: HostSettings
    parent: str
    cache: Path
    only_locked: bool = False

    def newest(self, names: Iterable[str]) -> tuple[tuple[Deb, ...], int]:
        """The packages that the image lacks for `names`, and their installed bytes. Raises `ExtensionError`."""
        wanted = tuple(names)
        try:
            files = self.download(wanted)
        except AptError as refused:
            raise ExtensionError(
                f"apt cannot add {', '.join(wanted)} to {self.variant.base.name}:\n{refused}",
                f"correct the name: {self.variant.base.image} has the packages of its own release only",
            ) from refused
        return tuple(sorted(files)), sum(files.values())

    def files(self, debs: Iterable[Deb]) -> tuple[Path, ...]:
        """The files of locked packages, from the cache or else from the mirror. Raises `MirrorMovedError`."""
        locked = tuple(debs)
        if missing := [deb for deb in locked if not self.place(deb).is_file()]:
            try:
                self.download([f"{deb.name}={deb.version}" for deb in locked])
            except AptError as refused:
                raise MirrorMovedError(f"the mirror no longer has what is locked:\n{refused}") from refused
            if changed := [deb.name for deb in missing if not self.place(deb).is_file()]:
                raise MirrorMovedError(f"the mirror has other files of {', '.join(changed)} than were locked")
        return tuple(map(self.place, locked))

    def place(self, deb: Deb) -> Path:
        return self.cache / "debs" / f"{deb.sha256}.deb"

    def download(self, names: Iterable[str]) -> dict[Deb, int]:
        """The installed bytes of each package that apt would install for `names`. Their files go into the cache."""
        tag = f"slipway:packages-{secrets.token_hex(6)}"
        with tempfile.TemporaryDirectory(prefix="slipway-packages-", dir=self.folder("contexts")) as name:
            context, files = Path(name, "context"), Path(name, "files")
            self.stage(context, names)
            settings = write_secrets(Path(name), self.variant.base, self.host)
            arguments = {"MOMENT": str(time.time_ns()), **self.host.proxies}  # apt asks the mirror each time
            self.engine.build(BuildRequest(context, (tag,), settings, arguments))
            try:
                self.copy_out(tag, files)
            finally:
                self.engine.call("rmi", tag)
            if (problem := files / "problem").is_file():
                raise AptError(shown(problem.read_text()))
            return self.keep(files)

    def stage(self, context: Path, names: Iterable[str]) -> None:
        context.mkdir()
        text = render_packages(self.matrix, self.variant, self.parent, names, self.lock)
        (context / "Dockerfile").write_text(text)
        shutil.copy2(self.matrix.images / "templates" / "fetch-packages", context / "fetch-packages")
        if self.parent == "bootstrap":
            base = bootstrap(self.variant, self.cache, self.lock.debs, self.lock.epoch, self.only_locked)
            link(base.tar, context / "rootfs.tar")
        if self.parent == "registry":
            (context / "preferences").write_text(preferences(self.variant, self.lock.debs))

    def copy_out(self, tag: str, folder: Path) -> None:
        created = self.engine.call("create", tag, "none")
        container = created.stdout.strip()
        copied = self.engine.call("cp", f"{container}:/", str(folder))
        self.engine.call("rm", container)
        if copied.returncode != 0:
            raise BuildError(f"{self.engine.name} cannot copy the packages: {copied.stderr.strip()}", "run it again")

    def keep(self, files: Path) -> dict[Deb, int]:
        kept = {}
        for line in (files / "listing").read_text().splitlines():
            file, name, version, kilobytes = line.split()
            deb = Deb(name, version, sha256(files / file))
            self.folder("debs")
            (files / file).replace(self.place(deb))
            kept[deb] = int(kilobytes) * 1024
        return kept

    def folder(self, name: str) -> Path:
        folder = self.cache / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def shown(problem: str) -> str:
    """apt's errors, indented, or the end of its output if it names none."""
    lines = problem.strip().splitlines()
    errors = [line for line in lines if line.startswith(("E:", "Remv "))]
    return "\n".join(f"  {line}" for line in errors or lines[-8:])
