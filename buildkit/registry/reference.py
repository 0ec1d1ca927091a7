"""Image names in a registry: `[http://]HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]`."""

import re
from dataclasses import dataclass, replace

from buildkit.errors import UsageError

# https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pulling-manifests
DOCKER_HUB = ("docker.io", "index.docker.io")
PATH = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
REFERENCE = re.compile(
    r"(?:(?P<scheme>https?)://)?"
    r"(?P<host>(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+)(?::[0-9]+)?)/"
    rf"(?P<repository>{PATH}(?:/{PATH})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True)
class Reference:
    """`str()` gives the name that `docker pull` takes. `secure` is False for a registry without TLS (`http://`)."""

    host: str
    repository: str
    tag: str = ""
    digest: str = ""
    secure: bool = True

    @property
    def name(self) -> str:
        return f"{self.host}/{self.repository}"

    @property
    def scheme(self) -> str:
        return "https" if self.secure else "http"

    @property
    def api_host(self) -> str:
        """The host that answers the registry API: Docker Hub's is not the one in its images' names."""
        return "registry-1.docker.io" if self.host in DOCKER_HUB else self.host

    def __str__(self) -> str:
        if self.digest:
            return f"{self.name}@{self.digest}"
        return f"{self.name}:{self.tag}" if self.tag else self.name

    def at(self, digest: str) -> "Reference":
        return replace(self, tag="", digest=digest)

    def tagged(self, tag: str) -> "Reference":
        return replace(self, tag=tag, digest="")


def parse_reference(text: str) -> Reference:
    """Raises `UsageError` for anything but an image name with its registry's host: no default host is assumed."""
    match = REFERENCE.fullmatch(text)
    host = match["host"] if match else ""
    if match is None or not ("." in host or ":" in host or host == "localhost"):
        raise UsageError(
            f"`{text}` names no image in a registry",
            "write HOST[:PORT]/REPOSITORY[:TAG][@sha256:…] in lower case, as in registry.example.com/team/slipway",
        )
    return Reference(
        host, match["repository"], match["tag"] or "", match["digest"] or "", secure=match["scheme"] != "http"
    )
