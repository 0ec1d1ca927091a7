"""The platforms that images are made for: Docker's name, and how wheels and Debian call the same machine."""

import platform
from dataclasses import dataclass

from buildkit.errors import UsageError


@dataclass(frozen=True)
class Platform:
    """`machine` is the kernel's and the wheels' word, `suffix` ends the names of variants, locks and tags."""

    name: str
    machine: str
    debian: str
    suffix: str = ""


AMD64 = Platform("linux/amd64", "x86_64", "amd64")
ARM64 = Platform("linux/arm64", "aarch64", "arm64", "-arm64")
PLATFORMS = {known.name: known for known in (AMD64, ARM64)}


def host_platform() -> Platform:
    """This host's platform. Raises `UsageError` for a machine that images are not made for."""
    machine = platform.machine()
    for known in PLATFORMS.values():
        if known.machine == machine:
            return known
    raise UsageError(f"no image is made for {machine}", f"name one: --platform {' or '.join(PLATFORMS)}")


def choose_platform(name: str | None) -> Platform:
    """The named platform, or this host's. Raises `UsageError` for an unknown name."""
    if name is None:
        return host_platform()
    if name not in PLATFORMS:
        raise UsageError(f"--platform {name}: unknown platform", f"one of: {', '.join(PLATFORMS)}")
    return PLATFORMS[name]
