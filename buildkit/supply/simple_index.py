"""Finds the wheels of a distribution in this host's wheel folders and in simple indexes.

A simple index lists the files of a distribution on one page, as JSON or as HTML
(https://packaging.python.org/specifications/simple-repository-api/). Vendors' indexes often serve HTML only.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import requests
from packaging.utils import canonicalize_name
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DistributionPackage,
    NoSuchProjectError,
    ProjectPage,
    PyPISimple,
    UnsupportedRepoVersionError,
)

from buildkit.errors import LockError, SettingsError
from buildkit.host.files import is_file
from buildkit.host.settings import HostSettings, as_path

log = logging.getLogger(__name__)

TIMEOUT = 60  # seconds without data until a request fails


@dataclass(frozen=True)
class OfferedFile:
    """A wheel or a source archive. `location` is a path on this host or a URL.

    `digests` are pairs of algorithm and value; folders have none.
    """

    filename: str
    location: str
    digests: tuple[tuple[str, str], ...] = ()

    @property
    def sha256(self) -> str:
        return dict(self.digests).get("sha256", "")

    @property
    def is_wheel(self) -> bool:
        return self.filename.endswith(".whl")


def offered_wheels(name: str, host: HostSettings, session: requests.Session) -> Iterator[OfferedFile]:
    """Wheels in folders, local indexes, remote indexes and the default index, in this order.

    `name` is normalized. Raises `LockError` for a server that is no simple index.
    """
    return (file for file in offered_files(name, host, session) if file.is_wheel)


def offered_files(name: str, host: HostSettings, session: requests.Session) -> Iterator[OfferedFile]:
    """As `offered_wheels`, with the source archives that the remote indexes list."""
    yield from local_offers(name, host)
    remote = [address for address in host.indexes if address.startswith("http")]
    for address in (*remote, host.default_index or PYPI_SIMPLE_ENDPOINT):
        yield from remote_offers(address, name, session)


def local_offers(name: str, host: HostSettings) -> Iterator[OfferedFile]:
    """Wheels of the host's folders, then of its `file:` indexes. `name` is normalized."""
    for folder in host.wheel_folders:
        for path in sorted(folder.glob("*.whl")) if folder.is_dir() else ():
            if canonicalize_name(path.name.split("-")[0]) == name:
                yield OfferedFile(path.name, str(path))
    for index in host.local_indexes:
        page = (index / name / "index.html").absolute()
        if page.is_file():
            for file in local_page(name, page):
                path = as_path(file.location)
                if file.is_wheel and file.location.startswith("file:") and is_file(path):
                    yield replace(file, location=str(path.resolve()))


def local_page(name: str, page: Path) -> list[OfferedFile]:
    """The files that a page of a `file:` index lists. Raises `SettingsError` if it cannot be read."""
    try:
        files = ProjectPage.from_html(name, page.read_bytes(), page.as_uri()).packages
        return [offered(file) for file in files if urlsplit(file.url)]
    except (OSError, ValueError, UnsupportedRepoVersionError) as error:
        raise SettingsError(
            f"{page} is not a page of a simple index: {error}", "check the indexes in pip's or uv's configuration"
        ) from error


def remote_offers(address: str, name: str, session: requests.Session) -> Iterator[OfferedFile]:
    """The files on an index's page; none after an HTTP error, because indexes answer 403 or 404 for unknown names."""
    index = PyPISimple(address, session=session)
    try:
        page = index.get_project_page(name, timeout=TIMEOUT)
    except NoSuchProjectError:
        return
    except requests.HTTPError as error:
        log.debug("lock: no %s: %s", name, error)
        return
    except (ValueError, UnsupportedRepoVersionError) as error:
        raise LockError(
            f"{index.get_project_url(name)} is not a page of a simple index: {error}",
            "check the indexes in pip's or uv's configuration",
        ) from error
    yield from map(offered, page.packages)


def offered(package: DistributionPackage) -> OfferedFile:
    return OfferedFile(package.filename, package.url, tuple(sorted(package.digests.items())))
