"""The host's settings as BuildKit secrets: a build reads them, and none of them stays in the image."""

from pathlib import Path

from buildkit.host.certificates import with_system_ca
from buildkit.host.settings import HostSettings, as_shell
from buildkit.recipe.matrix import Base

CA_IN_BUILD = "/run/slipway/ca.pem"


def write_secrets(folder: Path, base: Base, host: HostSettings) -> dict[str, Path]:
    """The host's settings as files that the build can read. Absent ones are empty, so that every mount works."""
    same_release = base.bootstrap is not None and base.bootstrap["suite"] in host.apt_sources
    contents = {
        "host_environment": as_shell(host.build_environment(CA_IN_BUILD)),
        "ca_bundle": with_system_ca(host.ca_bundle) if host.ca_bundle else "",
        "apt_sources": host.apt_sources if same_release else "",
    }
    paths = {name: folder / name for name in contents}
    for name, path in paths.items():
        path.write_text(contents[name])
    return paths
