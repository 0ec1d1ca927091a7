"""The host's configuration: package mirrors, certificates, local wheels, proxies.

A build uses them through secrets and its context, so that it works behind a mirror or offline, and none of it lands in
the image. Sources: pip's configuration (https://pip.pypa.io/en/stable/topics/configuration/), uv's environment
variables (https://docs.astral.sh/uv/reference/environment/), apt's sources.list(5), and the usual proxy variables.
`SLIPWAY_INDEX_MIRRORS` holds pairs `ADDRESS=MIRROR`: whatever lies below the one is fetched from below the other.
"""

import configparser
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from buildkit.errors import UsageError

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
UV_PATIENCE = ("UV_HTTP_TIMEOUT", "UV_HTTP_RETRIES")
CA_VARIABLES = ("UV_SSL_CERT_FILE", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
SYSTEM_CA = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))
LISTS = {"extra-index-url", "find-links", "trusted-host"}
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
    """Reads the configuration as pip and apt do: files from the least to the most specific, then the environment."""
    pip = read_pip(environ, root, home or Path.home())
    indexes = (
        environ.get("UV_INDEX", environ.get("UV_EXTRA_INDEX_URL", "")).split() or pip.get("extra-index-url", "").split()
    )
    links = environ.get("UV_FIND_LINKS", "").replace(",", " ").split() or pip.get("find-links", "").split()
    default = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL") or pip.get("index-url")
    return HostSettings(
        default_index=default,
        indexes=tuple(dict.fromkeys(indexes)),
        find_links=tuple(dict.fromkeys(links)),
        trusted_hosts=tuple(dict.fromkeys(pip.get("trusted-host", "").split())),
        ca_bundle=find_ca(environ, pip.get("cert"), root),
        proxies={name: environ[name] for name in PROXIES if environ.get(name)},
        apt_sources=read_apt(root),
        mirrors=read_mirrors(environ.get(MIRRORS, "")),
        patience={name: environ[name] for name in UV_PATIENCE if environ.get(name)},
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
    found = {address.rstrip("/"): mirror.rstrip("/") for address, _, mirror in pairs}
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def is_web(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def read_pip(environ: Mapping[str, str], root: Path, home: Path) -> dict[str, str]:
    config = Path(environ.get("XDG_CONFIG_HOME", home / ".config"))
    files = [root / "etc/xdg/pip/pip.conf", root / "etc/pip.conf", home / ".pip/pip.conf", config / "pip/pip.conf"]
    if explicit := environ.get("PIP_CONFIG_FILE"):
        files.append(Path(explicit))
    values: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        parser.read(file)
        for section in ("global", "install"):
            if parser.has_section(section):
                values.update(parser.items(section))
    for name in ("index-url", "cert", *LISTS):
        if value := environ.get("PIP_" + name.upper().replace("-", "_")):
            values[name] = value
    return values


def find_ca(environ: Mapping[str, str], configured: str | None, root: Path) -> Path | None:
    named = [Path(environ[name]) for name in CA_VARIABLES if environ.get(name)]
    candidates = [
        *named,
        *([Path(configured)] if configured else []),
        *(root / str(path).lstrip("/") for path in SYSTEM_CA),
    ]
    return next((path for path in candidates if path.is_file()), None)


def with_system_ca(named: Path | None, root: Path = Path("/")) -> str:
    """Certificates as PEM: the system's and the named ones, which alone would refuse every public server."""
    system = next((path for path in (root / str(path).lstrip("/") for path in SYSTEM_CA) if path.is_file()), None)
    paths = dict.fromkeys(path for path in (system, named) if path)
    return "\n".join(path.read_text() for path in paths)


def read_apt(root: Path) -> str:
    """The host's Debian sources as deb822 text, for builds of the same release."""
    folder = root / "etc/apt/sources.list.d"
    texts = [path.read_text() for path in sorted(folder.glob("debian*.sources"))] if folder.is_dir() else []
    return "\n".join(texts)


def as_shell(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(values.items()))
