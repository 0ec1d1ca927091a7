"""A user's additions to an image, from `build --with --apt --copy` or `[extend]` in slipway.toml."""

import hashlib
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from buildkit.errors import ExtensionError
from buildkit.recipe.lock import Lock

PLACE = "/opt/slipway/extension"  # in the image, where the folders lie; every image's Python imports from there
PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?")  # deb-control(5)
FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LEFT_OUT = (".git", ".venv", "__pycache__")  # of the folders

COMMENT = re.compile(r"(^|\s)#.*")
HASH = re.compile(r"\s--hash[= ]sha256:([0-9a-f]{64})")
OPTION = re.compile(r"-{1,2}[a-z-]+")
PATH = re.compile(r"[./~]|.*\.(whl|zip|tar\.gz)$|[^@;]*/")
ADDRESS = re.compile(r"[a-z+]+://|git\+")
PROJECTS = "add a folder of code by --copy; put a wheel where pip's `find-links` on this host finds it, and name it"
INDEXES = "name indexes in this host's pip or uv configuration, so that no lock and no image contains their address"
OPTIONS = {
    **dict.fromkeys(("-e", "--editable"), ("a path", PROJECTS)),
    **dict.fromkeys(
        ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--no-index", "--trusted-host"),
        ("an index", INDEXES),
    ),
    **dict.fromkeys(("-r", "--requirement"), ("another file", "name that file by --with, too")),
    **dict.fromkeys(("-c", "--constraint"), ("another file", "write the bounds beside the requirements")),
}


@dataclass(frozen=True)
class Extension:
    """`requirements` maps each requirement (PEP 508) to the file and line that names it. `packages` are Debian's.

    `hashes` are the sha256 that a file accepts of a distribution. `folders` lie on this host.
    """

    requirements: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    hashes: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def project_paths(self) -> list[str]:
        """Import paths of the folders that are projects; the others are packages themselves."""
        projects = [folder for folder in self.folders if (folder / "pyproject.toml").is_file()]
        return [f"{PLACE}/{folder.name}{'/src' if (folder / 'src').is_dir() else ''}" for folder in projects]

    @property
    def resolved(self) -> bool:
        """Whether it has anything to resolve and to lock; folders are as they are."""
        return bool(self.requirements or self.packages)

    def with_more(self, more: "Extension") -> "Extension":
        """Both together. Raises `ExtensionError` for two folders of one name."""
        folders = tuple(dict.fromkeys((*self.folders, *more.folders)))
        refuse_same_names(folders)
        return Extension(
            self.requirements | more.requirements,
            tuple(dict.fromkeys((*self.packages, *more.packages))),
            folders,
            self.hashes | more.hashes,
        )


@dataclass(frozen=True)
class LockedExtension:
    """`lock` has the wheels and Debian packages that come on top of the image's; `debs` are the packages' files."""

    extension: Extension
    lock: Lock
    debs: tuple[Path, ...] = ()

    @property
    def folders(self) -> dict[str, str]:
        """The digest of each folder by its name."""
        return {folder.name: folder_digest(folder) for folder in self.extension.folders}

    @property
    def digest(self) -> str:
        """sha256 over everything that is added, in hexadecimal."""
        lines = [self.lock.digest, *(f"{name} {digest}" for name, digest in sorted(self.folders.items()))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def bytes(self) -> int:
        """Uncompressed size of everything that is added."""
        files = (path.lstat().st_size for folder in self.extension.folders for path in files_of(folder))
        return self.lock.base_bytes + sum(wheel.installed_bytes for wheel in self.lock.wheels.values()) + sum(files)

    def describe(self) -> dict[str, Any]:
        """The extension in the manifest of its image."""
        return {
            "digest": f"sha256:{self.digest}",
            "requirements": list(self.extension.requirements),
            "packages": list(self.extension.packages),
            "folders": self.folders,
        }


def read_extension(files: Iterable[Path], packages: Iterable[str], folders: Iterable[Path]) -> Extension | None:
    """The extension that these requirements files, Debian packages and folders make; None if there are none.

    A folder with a pyproject.toml also adds the dependencies of its project. Raises `ExtensionError`.
    """
    extension = Extension(packages=tuple(dict.fromkeys(map(checked_package, packages))))
    for path in files:
        extension = extension.with_more(read_requirements(path))
    for folder in folders:
        extension = extension.with_more(read_folder(folder))
    return None if extension == Extension() else extension


def checked_package(name: str) -> str:
    if not PACKAGE.fullmatch(name):
        raise ExtensionError(f"`{name}` is no name of a Debian package", "write it like jq, or jq=1.6-2.1")
    return name


# ---- requirements files ----------------------------------------------------------------------------------------------


def read_requirements(path: Path) -> Extension:
    """The requirements of a file in pip's format. Raises `ExtensionError` for a path, an index, or another option."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExtensionError(f"{path} cannot be read: {error}", "name a requirements file, as pip reads it") from error
    requirements: dict[str, str] = {}
    hashes: dict[str, frozenset[str]] = {}
    for number, line in logical_lines(text):
        place = f"{path.name}, line {number}"
        requirement = parse_requirement(HASH.sub("", line).strip(), place)
        requirements[str(requirement)] = place
        if accepted := frozenset(HASH.findall(line)):
            hashes[canonicalize_name(requirement.name)] = accepted
    if not requirements:
        raise ExtensionError(f"{path} names no requirement", "write one a line, like six>=1.17, or leave the file out")
    return Extension(requirements, hashes=hashes)


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, each with the number of its first one; a `\\` at the end continues a line."""
    start, pending = 1, ""
    for number, line in enumerate(text.splitlines(), start=1):
        start = start if pending else number
        pending += COMMENT.sub("", line)
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        if pending.strip():
            yield start, pending.strip()
        pending = ""
    if pending.strip():
        yield start, pending.strip()


def parse_requirement(text: str, place: str) -> Requirement:
    """Raises `ExtensionError` unless it names a distribution, which an index or folder of this host provides."""
    if option := OPTION.match(text):
        known = OPTIONS.get(option[0])
        problem = f"names {known[0]}" if known else f"has the option {option[0]}"
        raise ExtensionError(f"{place}: `{text}` {problem}", known[1] if known else "leave it out")
    address = ADDRESS.search(text)
    if text.startswith("file:") or (PATH.match(text) and not address):
        raise ExtensionError(f"{place}: `{text}` names a path", PROJECTS)
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        if address:
            raise ExtensionError(f"{place}: `{text}` names an address", INDEXES) from error
        raise ExtensionError(f"{place}: `{text}` is no requirement", "write it like six>=1.17") from error
    if requirement.url:
        kind, hint = ("a path", PROJECTS) if requirement.url.startswith("file:") else ("an address", INDEXES)
        raise ExtensionError(f"{place}: `{text}` names {kind}", hint)
    return requirement


# ---- folders ---------------------------------------------------------------------------------------------------------


def read_folder(folder: Path) -> Extension:
    """The folder and its project's dependencies. Raises `ExtensionError` for what cannot be copied as it is."""
    path = folder.resolve()
    if not path.is_dir():
        raise ExtensionError(f"{folder} is no folder", "name a folder to copy; a single file goes into one")
    if not FOLDER.fullmatch(path.name):
        raise ExtensionError(f"{folder}: an image can have no such name", "use letters, digits, dots and dashes")
    for file in files_of(path):
        if file.is_symlink() and not file.resolve().is_relative_to(path):
            raise ExtensionError(f"{file} is a link to outside of {folder}", "copy what it points to in its place")
    return Extension(read_dependencies(path / "pyproject.toml"), folders=(path,))


def read_dependencies(project: Path) -> dict[str, str]:
    """The dependencies of a project by the place that names them; none without the file. Raises `ExtensionError`."""
    if not project.is_file():
        return {}
    place = f"{project.parent.name}/{project.name}"
    try:
        table = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        dependencies, dynamic = table.get("dependencies", []), table.get("dynamic", [])
    except (ValueError, AttributeError) as error:
        raise ExtensionError(f"{project} cannot be read: {error}", "correct the TOML there") from error
    if "dependencies" in dynamic:
        raise ExtensionError(
            f"{place}: its dependencies are dynamic, and only a build tells them",
            "list them in the file, or in one of --with with the folder of the package alone by --copy",
        )
    if not isinstance(dependencies, list) or not all(isinstance(text, str) for text in dependencies):
        raise ExtensionError(f"{place}: `dependencies` is not a list of requirements", 'write dependencies = ["…"]')
    return {str(parse_requirement(text, place)): place for text in dependencies}


def refuse_same_names(folders: tuple[Path, ...]) -> None:
    names = [folder.name for folder in folders]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ExtensionError(f"two folders are called {twice[0]}", "rename one: both would lie in the same place")


def files_of(folder: Path) -> Iterator[Path]:
    """The files of a folder that go into an image, in a fixed order."""
    for path in sorted(folder.rglob("*")):
        if not set(path.relative_to(folder).parts) & set(LEFT_OUT) and (path.is_symlink() or path.is_file()):
            yield path


def folder_digest(folder: Path) -> str:
    """`sha256:…` over the names, contents and executable bits of the files."""
    sha256 = hashlib.sha256()
    for path in files_of(folder):
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        kind = "l" if path.is_symlink() else "x" if path.stat().st_mode & 0o100 else "f"
        name = path.relative_to(folder).as_posix()
        sha256.update(f"{kind} {name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return f"sha256:{sha256.hexdigest()}"
