"""HTTP requests to one repository: credentials, certificates, proxies, retries, and errors in plain words."""

import logging
import os
import ssl
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies

import requests

from buildkit.errors import RegistryError, UnreachableError
from buildkit.host.certificates import with_system_ca
from buildkit.registry.answers import ANSWER_LIMIT, MALFORMED, innermost, read_limited, resolve, without_query
from buildkit.registry.credentials import Anonymous, Credentials, authorize, trusted_ca
from buildkit.registry.reference import Reference

log = logging.getLogger(__name__)

TIMEOUT = (10, 60)  # seconds to connect, and between two pieces of an answer
BUSY = {408, 429, 500, 502, 503, 504}


class Transport:
    """Sends requests to one repository. `patience` is how many seconds a failing request is repeated."""

    def __init__(self, reference: Reference, credentials: Credentials, ca: Path | None, patience: float) -> None:
        self.reference, self.patience = reference, patience
        self._credentials = credentials
        self._base = f"{reference.scheme}://{reference.api_host}/v2/{reference.repository}/"
        self._session = Session(reference)
        self._session.trust_env = False  # credentials come from docker's configuration, never from ~/.netrc
        self._session.proxies = getproxies() if needs_proxy(self._base) else {}
        # A plain registry gets authorities, too: its token server may be an HTTPS one.
        self._session.verify = authorities_file(self, with_system_ca(trusted_ca(reference.host, ca)))

    def send(
        self,
        method: str,
        path: str,
        *,
        data: bytes | BinaryIO | None = None,
        accept: str = "",
        content_type: str = "",
        query: Mapping[str, str] | None = None,
        allowed: set[int] | frozenset[int] = frozenset(),
        stream: bool = False,
    ) -> requests.Response:
        """The registry's answer; `path` is relative to the repository, or a URL. Only `stream` leaves its body unread.

        Raises `RegistryError` for a status above 399 that is not `allowed`, for a larger answer than `ANSWER_LIMIT`,
        for a URL without TLS where the registry has it or that is none, and `UnreachableError` when the patience is
        used up.
        """
        headers = {"Accept": accept or "*/*"}
        if content_type:
            headers["Content-Type"] = content_type
        request = requests.Request(method, urljoin(self._base, path), headers, data=data, params=query)
        refuse_plain(self.reference, request.url)
        end, pause = time.monotonic() + self.patience, 0.25
        while True:
            answer = self._try(request)
            if isinstance(answer, requests.Response):
                if answer.status_code < 400 or answer.status_code in allowed:
                    if not stream:
                        read_limited(answer, ANSWER_LIMIT, self.reference.name, path)
                    return answer
                read_limited(answer, ANSWER_LIMIT, self.reference.name, path)
                problem = explain(answer)
                if answer.status_code not in BUSY or is_full(problem):
                    raise refusal(self.reference, method, answer, problem)
            else:
                problem = answer
            if time.monotonic() + pause > end:
                raise UnreachableError(
                    f"{self.reference.host} did not answer {method} {path.partition('?')[0]} within "
                    f"{self.patience:g} s: {problem}",
                    "check the registry, then run the same command again; content that arrived is not sent again",
                )
            log.info("registry: %s; retrying in %.1f s", problem, pause)
            time.sleep(pause)
            pause = min(2 * pause, 8)

    def _try(self, request: requests.Request) -> requests.Response | str:
        """The answer, with credentials if the registry asks for them; or the reason why there is none.

        Raises `RegistryError` for a redirect, a token server or a token that no request can be made of.
        """
        try:
            answer = self._session.send(self._prepare(request), stream=True, timeout=TIMEOUT)
            # The registry itself asks for the password. What it redirects to may name a token server of its own.
            if answer.status_code == 401 and not answer.history and self._is_ours(answer.url):
                answer.close()
                push = request.method not in ("GET", "HEAD")
                authorize(self._session, answer, self._credentials, self.reference, push)
                answer = self._session.send(self._prepare(request), stream=True, timeout=TIMEOUT)
            return answer
        except (ValueError, requests.TooManyRedirects) as error:
            raise RegistryError(
                f"{self.reference.host} sends an address or a header that cannot be used: {without_query(str(error))}",
                MALFORMED,
            ) from error
        except requests.RequestException as error:
            cause = innermost(error)
            if not isinstance(cause, ssl.SSLCertVerificationError):
                return str(cause)
            raise UnreachableError(
                f"{self.reference.host} has no certificate that this host trusts: {cause.verify_message}",
                "name the certificate of its authority with --registry-ca FILE, or copy it to "
                f"/etc/docker/certs.d/{self.reference.host}/ca.crt",
            ) from error

    def _prepare(self, request: requests.Request) -> requests.PreparedRequest:
        if not self._is_ours(request.url):  # registries send uploads to storage on other hosts
            request.auth = Anonymous()
        if hasattr(request.data, "seek"):
            request.data.seek(0)  # an earlier attempt may have read it
        return self._session.prepare_request(request)

    def _is_ours(self, url: str) -> bool:
        """Whether the registry's credentials may go to this address."""
        asked, ours = urlsplit(url), urlsplit(self._base)
        return (asked.scheme, asked.netloc) == (ours.scheme, ours.netloc)


class Session(requests.Session):
    """Follows no redirect from a registry with TLS to an address without it."""

    def __init__(self, reference: Reference) -> None:
        super().__init__()
        self._reference = reference

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        target = super().get_redirect_target(resp)
        if target:
            refuse_plain(self._reference, resolve(resp.url, target, self._reference.host))
        return target


def refuse_plain(reference: Reference, url: str) -> None:
    if reference.secure and urlsplit(url).scheme != "https":
        raise RegistryError(
            f"{reference.host} sends us to {without_query(url)}, which is not HTTPS",
            "set the registry's public address to its https:// one; a proxy before it must pass X-Forwarded-Proto",
        )


def authorities_file(owner: object, certificates: str) -> str | bool:
    """`verify` of requests: a file that lives as long as its owner, or True for the default authorities."""
    if not certificates:
        return True
    descriptor, name = tempfile.mkstemp(prefix="slipway-ca-", suffix=".pem")
    with os.fdopen(descriptor, "w") as file:
        file.write(certificates)
    weakref.finalize(owner, Path(name).unlink, missing_ok=True)
    return name


def needs_proxy(url: str) -> bool:
    return not requests.utils.should_bypass_proxies(url, no_proxy=None)


# ---- errors ----------------------------------------------------------------------------------------------------------


def explain(answer: requests.Response) -> str:
    """The status and the registry's own reason."""
    try:
        errors = answer.json()["errors"]
        reason = "; ".join(
            f"{entry.get('message') or entry['code']} {entry.get('detail') or ''}".strip() for entry in errors
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        reason = answer.reason or "no reason given"
    return f"HTTP {answer.status_code}: {reason}"


def is_full(problem: str) -> bool:
    """Debian's docker-registry passes on the system's error, with its number (28, ENOSPC)."""
    return "no space left" in problem or "'Err': 28" in problem


def refusal(reference: Reference, method: str, answer: requests.Response, problem: str) -> RegistryError:
    if is_full(problem):
        return RegistryError(f"{reference.host} has no space left: {problem}", "free space there, then run this again")
    message = f"{reference.host} refuses {method} {answer.request.path_url.partition('?')[0]}: {problem}"
    if answer.status_code in (401, 403):
        return UnreachableError(
            message, f"run `docker login {reference.host}` as a user who may push to {reference.repository}"
        )
    return RegistryError(message, "the registry's own reason is above")
