"""Removes the hashes of source archives from a lock: to install one is to run its author's code."""

from concurrent.futures import ThreadPoolExecutor

import requests

from buildkit.errors import LockError
from buildkit.host.settings import HostSettings
from buildkit.recipe.lock import Pin, parse_pins
from buildkit.supply.simple_index import offered_files

SEPARATOR = " \\\n    "  # before each hash, as uv writes them


def only_wheels(requirements: str, host: HostSettings) -> str:
    """The requirements without the hashes that the indexes list for other files than wheels.

    A hash that no index lists stays: uv computed it from the wheel. Raises `LockError` for a pin without a wheel.
    """
    with requests.Session() as session, ThreadPoolExecutor(8) as pool:
        session.verify = str(host.ca_bundle) if host.ca_bundle else True

        def archives(pin: Pin) -> frozenset[str]:
            files = list(offered_files(pin.name, host, session))
            wheels = {file.sha256 for file in files if file.is_wheel}
            hashes = pin.hashes & ({file.sha256 for file in files} - wheels)
            if hashes == pin.hashes:
                raise LockError(
                    f"no index has a wheel of {pin.name} {pin.version}",
                    "pin a version that has one; source archives are never locked",
                )
            return hashes

        try:
            for hashes in pool.map(archives, parse_pins(requirements)):
                for sha256 in hashes:
                    requirements = requirements.replace(f"{SEPARATOR}--hash=sha256:{sha256}", "")
        except requests.RequestException as error:
            raise LockError(
                f"a package index could not be read: {error}", "check that it can be reached; no lock was changed"
            ) from error
    return requirements
