"""Bodies of a registry's answers, read up to a limit, the addresses in them, and the errors of broken connections."""

from contextlib import closing
from urllib.parse import urljoin, urlsplit

import requests

from buildkit.errors import RegistryError, UnreachableError

MALFORMED = "check with `curl` that the address is an image registry"

BLOCK = 2**20  # bytes read at once
ANSWER_LIMIT = 2**22  # bytes of an answer that is no blob; the specification's limit of a manifest


def read_limited(answer: requests.Response, limit: int, repository: str, address: str) -> bytes:
    """The body of a streamed answer, kept in it. Raises `RegistryError` when it is larger than `limit` bytes."""
    body = bytearray()
    with closing(answer):
        try:
            for chunk in answer.iter_content(min(BLOCK, limit + 1)):
                body += chunk
                if len(body) > limit:
                    raise RegistryError(
                        f"{repository} sends more than {limit} bytes for {without_query(address)}, the limit",
                        "do not use this image; find out who published it",
                    )
        except requests.RequestException as error:
            raise broken_off(repository, without_query(address), error) from error
    answer._content = bytes(body)  # what `answer.content` and `answer.json()` read
    return bytes(body)


def resolve(base: str, address: str, host: str) -> str:
    """The absolute URL of an address in an answer from `base`. Raises `RegistryError` for what is none."""
    try:
        url = urljoin(base, address)
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # also for a port that is no number
        usable = False
    if not usable:
        raise RegistryError(f"{host} sends us to {without_query(address)[:200]!r}, which is no address", MALFORMED)
    return url


def without_query(url: str) -> str:
    """For messages: queries of storage addresses hold signatures."""
    return url.partition("?")[0]


def broken_off(repository: str, address: str, error: requests.RequestException) -> UnreachableError:
    return UnreachableError(
        f"the connection broke while {repository} sent {address}: {innermost(error)}", "run the same command again"
    )


def innermost(error: BaseException) -> BaseException:
    """The first cause: requests wraps it three times."""
    while error.__context__ is not None:
        error = error.__context__
    return error
