"""The wheel indexes of vendors that a variant names, as this host reaches them.

They come from `indexes` in images/matrix.toml and go before the host's own indexes. No lock and no image names them.
"""

import logging
from dataclasses import replace

import requests

from buildkit.host.settings import HostSettings, without_password
from buildkit.recipe.matrix import Variant

log = logging.getLogger(__name__)

PATIENCE = 10.0  # seconds that an index has to answer


def with_vendor_indexes(host: HostSettings, variant: Variant) -> HostSettings:
    """The host's settings with the variant's indexes first, each replaced by its mirror.

    An index that does not answer is left out with a warning: the host's own indexes may have the wheels, too.
    """
    answering = [address for address in addresses(host, variant) if answers(address, host)]
    return replace(host, indexes=tuple(dict.fromkeys((*answering, *host.indexes))))


def silent_indexes(host: HostSettings, variant: Variant) -> list[str]:
    """The variant's indexes that `with_vendor_indexes` left out of these settings, without passwords."""
    return [without_password(address) for address in addresses(host, variant) if address not in host.indexes]


def sources(host: HostSettings, variant: Variant) -> dict[str, str]:
    """The address of its one index, by distribution, for those that come from one only. Silent indexes are left out."""
    pairs = ((host.mirrored(address), index) for address, index in variant.indexes.items())
    return {name: address for address, index in pairs for name in index.only if address in host.indexes}


def addresses(host: HostSettings, variant: Variant) -> list[str]:
    return [host.mirrored(address) for address in variant.indexes]


def answers(address: str, host: HostSettings) -> bool:
    """Whether a server answers there. Any HTTP status counts, because many indexes have no page at their root."""
    certificates = str(host.ca_bundle) if host.ca_bundle else True
    try:
        requests.head(address, timeout=PATIENCE, verify=certificates)
    except requests.RequestException as error:
        shown = without_password(address)
        log.warning("indexes: %s does not answer (%s); continuing without it", shown, type(error).__name__)
        return False
    return True
