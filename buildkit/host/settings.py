"""The host's configuration: package mirrors, certificates, local wheels, proxies.

A build uses them through secrets and its context, so that it works behind a mirror or offline, and none of it lands in
the image. Sources: pip's configuration (https://pip.pypa.io/en/stable/topics/configuration/), uv's environment
variables (https://docs.astral.sh/uv/reference/environment/) and files, apt's sources.list(5), and the usual proxy
variables. A file that is there and cannot be understood is a `SettingsError`, never skipped.
`SLIPWAY_INDEX_MIRRORS` holds pairs `ADDRESS=MIRROR`: whatever lies below the one is fetched from below the other.
"""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from buildkit.errors import SettingsError, UsageError
from buildkit.host.certificates import find_ca
from buildkit.host.files import settings_text
from buildkit.host.index_settings import read_pip, read_uv

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
UV_PATIENCE = ("UV_HTTP_TIMEOUT", "UV_HTTP_RETRIES")
LONGEST_NAME = 255  # bytes of a folder's name
MIRRORS = "SLIPWAY_INDEX_MIRRORS"


@dataclass(frozen=True)
class HostSettings:
    """`indexes` are simple indexes after the default one. Those with `file:`, and `find_links`, are folders here.

    `mirrors` maps the start of a vendor's address to the start of its mirror's. `patience` holds uv's variables for
    slow mirrors.
    """

    default_index: str | None
    indexes: tuple[str, ...]
    find_links: tuple[str, ...]
    trusted_hosts: tuple[str, ...]
    ca_bundle: Path | None
    proxies: dict[str, str]
    apt_sources: str
    mirrors: dict[str, str] = field(default_factory=dict)
    patience: dict[str, str] = field(default_factory=dict)

    @property
    def local_indexes(self) -> tuple[Path, ...]:
        return tuple(as_path(url) for url in self.indexes if url.startswith("file:"))

    @property
    def wheel_folders(self) -> tuple[Path, ...]:
        return tuple(as_path(link) for link in self.find_links if not link.startswith(("http:", "https:")))

    def mirrored(self, address: str) -> str:
        """The address of a vendor's index as this host reaches it: below its mirror, or unchanged."""
        for start, mirror in self.mirrors.items():
            if address == start or address.startswith(f"{start}/"):
                return mirror + address.removeprefix(start)
        return address

    def build_environment(self, ca_bundle: str) -> dict[str, str]:
        """Variables for uv inside a build, without local folders: their wheels are copied into the context."""
        remote = [url for url in self.indexes if not url.startswith("file:")]
        remote_links = [link for link in self.find_links if link.startswith(("http:", "https:"))]
        values = {
            "UV_DEFAULT_INDEX": self.default_index or "",
            "UV_INDEX": " ".join(remote),
            "UV_FIND_LINKS": " ".join(remote_links),
            "UV_INSECURE_HOST": " ".join(self.trusted_hosts),
            "SSL_CERT_FILE": ca_bundle if self.ca_bundle else "",
            **self.patience,
            **self.proxies,
        }
        return {name: value for name, value in values.items() if value}


def without_password(address: str) -> str:
    """The address without user and password, for messages."""
    try:
        parts = urlsplit(address)
    except ValueError:  # no address at all
        return f"…{address.rpartition('@')[2]}" if "@" in address else address
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def as_path(location: str) -> Path:
    return Path(unquote(urlsplit(location).path) if location.startswith("file:") else location)


def read_host(
    environ: Mapping[str, str] = os.environ, root: Path = Path("/"), home: Path | None = None
) -> HostSettings:
    """Reads the configuration as uv, pip and apt do: uv's variables, uv's files, then what pip is told.

    Raises `SettingsError` for a file that cannot be understood, and for an address that is none.
    """
    pip, uv = read_pip(environ, root, home or Path.home()), read_uv(environ, root, home or Path.home())
    named = environ.get("UV_INDEX", environ.get("UV_EXTRA_INDEX_URL", "")).split()
    indexes = [without_name(index) for index in named] or uv.indexes or pip.get("extra-index-url", "").split()
    links = (
        environ.get("UV_FIND_LINKS", "").replace(",", " ").split() or uv.find_links or pip.get("find-links", "").split()
    )
    default = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL") or uv.default_index or pip.get("index-url")
    default = without_name(default) if default else None
    for address in (*indexes, *links, *([default] if default else [])):
        check_address(address)
    return HostSettings(
        default_index=default,
        indexes=tuple(dict.fromkeys(indexes)),
        find_links=tuple(dict.fromkeys(links)),
        trusted_hosts=tuple(dict.fromkeys((*uv.trusted_hosts, *pip.get("trusted-host", "").split()))),
        ca_bundle=find_ca(environ, pip.get("cert"), root),
        proxies={name: environ[name] for name in PROXIES if environ.get(name)},
        apt_sources=read_apt(root),
        mirrors=read_mirrors(environ.get(MIRRORS, "")),
        patience={name: environ[name] for name in UV_PATIENCE if environ.get(name)},
    )


def without_name(index: str) -> str:
    """The address of an index that uv's variables give as `NAME=ADDRESS`."""
    name, equals, address = index.partition("=")
    return address if equals and name.replace("-", "").replace("_", "").replace(".", "").isalnum() else index


def check_address(address: str) -> None:
    """Raises `SettingsError` for text that is neither an address nor a path."""
    try:
        parts = () if is_web(address) and urlsplit(address) else as_path(address).parts
        usable = "\0" not in address and all(len(part.encode()) <= LONGEST_NAME for part in parts)
    except ValueError:  # also text that is not UTF-8
        usable = False
    if not usable:
        raise SettingsError(
            f"{without_password(address)[:200]!r} is no address of an index or a folder",
            "correct pip's or uv's configuration",
        )


def read_mirrors(text: str) -> dict[str, str]:
    """Mirrors by the address that they replace, the longest first. Raises `UsageError` for a malformed pair."""
    pairs = [pair.partition("=") for pair in text.split()]
    for address, _, mirror in pairs:
        if not (is_web(address) and is_web(mirror)):
            raise UsageError(
                f"{MIRRORS}: {without_password(address)}={without_password(mirror)} is not ADDRESS=MIRROR",
                "separate pairs by spaces: https://wheels.vllm.ai=https://mirror.example/vllm",
            )
    mirrors = {address.rstrip("/"): mirror.rstrip("/") for address, _, mirror in pairs}
    return dict(sorted(mirrors.items(), key=lambda pair: -len(pair[0])))


def is_web(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def read_apt(root: Path) -> str:
    """The host's Debian sources as deb822 text, for builds of the same release."""
    folder = root / "etc/apt/sources.list.d"
    texts = [settings_text(path) for path in sorted(folder.glob("debian*.sources"))] if folder.is_dir() else []
    return "\n".join(texts)


def as_shell(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(values.items()))
