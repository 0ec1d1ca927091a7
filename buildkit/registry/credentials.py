"""Credentials and certificates for a registry: docker's configuration, basic and token authentication.

Tokens: https://distribution.github.io/distribution/spec/auth/token/.
"""

import json
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

import requests
from docker.auth import AuthConfig, load_config
from docker.errors import DockerException
from docker.utils.config import find_config_file

from buildkit.errors import RegistryError, SettingsError, UnreachableError
from buildkit.host.certificates import find_ca
from buildkit.host.files import settings_text
from buildkit.registry.answers import ANSWER_LIMIT, read_limited, resolve
from buildkit.registry.reference import Reference

TIMEOUT = (10, 30)  # seconds to connect, and for an answer
TOKEN = re.compile(r"[!-~]+")
CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Credentials:
    """Empty for an anonymous caller. Some registries give `docker login` an `identity_token` instead of a password."""

    user: str = ""
    password: str = ""
    identity_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r})"


def read_credentials(host: str) -> Credentials:
    """The credentials of `docker login HOST`, from `$DOCKER_CONFIG`, `~/.docker` or a credential helper.

    Raises `SettingsError` for a file that is no configuration of docker's, `RegistryError` if a helper fails.
    """
    content = docker_config()
    if not content:
        return Credentials()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about an absent helper, which its error names
            config: AuthConfig = load_config(config_dict=content)
            stored = config.resolve_authconfig(host) or {}
        # The SDK spells them in two ways: as in config.json, and as credential helpers answer.
        values = {name.lower(): str(value) for name, value in stored.items() if value}
    except DockerException as error:
        raise RegistryError(
            f"docker's stored credentials for {host} cannot be read: {error}", f"run `docker login {host}` again"
        ) from error
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:  # the SDK checks no types
        raise SettingsError(
            f"docker's stored credentials for {host} are malformed, in {config_file()} or in a helper's answer "
            f"({type(error).__name__})",
            f"run `docker login {host}` again",
        ) from error
    return Credentials(values.get("username", ""), values.get("password", ""), values.get("identitytoken", ""))


def docker_config() -> dict[str, Any]:
    """docker's configuration; empty where there is none. Raises `SettingsError` if it is no JSON object."""
    path = config_file()
    if path is None:
        return {}
    try:
        content = json.loads(settings_text(path))
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is no JSON: {error}", "correct it, or remove it and run `docker login`") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} is no JSON object", "correct it, or remove it and run `docker login`")
    return content


def config_file() -> Path | None:
    path = find_config_file()
    return Path(str(path)) if path else None


def trusted_ca(host: str, named: Path | None) -> Path | None:
    """The named certificates, docker's for this registry, or the system's, in this order."""
    folder = Path("/etc/docker/certs.d") / host
    return named or next(iter(sorted(folder.glob("*.crt"))), None) or find_ca(os.environ, None, Path("/"))


def authorize(
    session: requests.Session, answer: requests.Response, credentials: Credentials, reference: Reference, push: bool
) -> None:
    """Adds the credentials that the 401 answer asks for to the session. Raises `RegistryError` if there are none."""
    scheme, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
    if scheme.lower() == "basic" and credentials.user:
        session.auth = (credentials.user, credentials.password)
    elif scheme.lower() == "bearer":
        challenge = {match[1]: match[2] for match in CHALLENGE.finditer(rest)}
        if push:  # some registries ask for `pull` only, even when we push
            challenge["scope"] = f"repository:{reference.repository}:pull,push"
        session.auth = Bearer(fetch_token(session, challenge, credentials, reference))
    else:
        raise UnreachableError(
            f"{reference.host} requires a password, and docker's configuration has none",
            f"run `docker login {reference.host}`",
        )


@dataclass(frozen=True, repr=False)
class Bearer(requests.auth.AuthBase):
    token: str

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.token}"
        return request


class TokenRequest(TypedDict):
    timeout: tuple[int, int]
    stream: bool
    allow_redirects: bool


def fetch_token(
    session: requests.Session, challenge: dict[str, str], credentials: Credentials, reference: Reference
) -> str:
    realm = challenge.get("realm", "")
    parts = urlsplit(resolve(realm, "", reference.host))
    if reference.secure and parts.scheme != "https":
        raise RegistryError(
            f"{reference.host} asks us to send the password to {realm or 'nowhere'}, which is not HTTPS",
            "set an https:// token realm in the registry's configuration",
        )
    # A redirect would carry the password on to a host that the registry did not name.
    options: TokenRequest = {"timeout": TIMEOUT, "stream": True, "allow_redirects": False}
    query: dict[str, str] = {name: challenge[name] for name in ("service", "scope") if name in challenge}
    if credentials.identity_token:
        form = {
            **query,
            "grant_type": "refresh_token",
            "refresh_token": credentials.identity_token,
            "client_id": "slipway",
        }
        answer = session.post(realm, data=form, auth=Anonymous(), **options)
    else:
        basic = requests.auth.HTTPBasicAuth(credentials.user, credentials.password)
        answer = session.get(realm, params=query, auth=basic if credentials.user else Anonymous(), **options)
    content = read_limited(answer, ANSWER_LIMIT, str(parts.hostname), "a token")
    token = token_in(content) if answer.status_code == 200 else ""
    if not token:
        raise UnreachableError(
            f"{parts.hostname} gave no token for {reference.name}: HTTP {answer.status_code}",
            f"run `docker login {reference.host}` as a user who may push to {reference.repository}",
        )
    return token


def token_in(content: bytes) -> str:
    """The token in a token server's answer; empty if it has none that a header can carry."""
    try:
        answer = json.loads(content)
        token = answer.get("token") or answer.get("access_token")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return token if isinstance(token, str) and TOKEN.fullmatch(token) else ""


class Anonymous(requests.auth.AuthBase):
    """Sends no credentials, so that the session's token goes to no other server."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        return request
