"""Which versions are installed, found without importing anything."""

from importlib import metadata


def installed(distribution: str) -> str:
    """The installed version; "none" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
