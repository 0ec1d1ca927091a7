"""Keeps requests between the job's nodes, and to loopback, away from the user's HTTP proxy."""

from collections.abc import Iterable, Mapping

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_EXCEPTIONS = ("no_proxy", "NO_PROXY")
"""Programs read the first or the second, so both get the same value."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def past_proxies(environment: Mapping[str, str], addresses: Iterable[str] = ()) -> dict[str, str]:
    """The variables that except these addresses and loopback from the proxy, beside what the user excepts.

    None if the environment has no proxy, or if nothing goes through it.
    """
    if not any(name.lower() in _PROXIES and value for name, value in environment.items()):
        return {}
    users = [entry.strip() for name in _EXCEPTIONS for entry in environment.get(name, "").split(",")]
    if "*" in users:
        return {}
    exceptions = ",".join(dict.fromkeys((*filter(None, users), *LOOPBACK, *addresses)))
    return dict.fromkeys(_EXCEPTIONS, exceptions)
