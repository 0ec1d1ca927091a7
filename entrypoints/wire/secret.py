"""The job's shared secret: reading it, and proving knowledge of it without sending it."""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from entrypoints.errors import TokenError
from entrypoints.options import JOB_DIR, TOKEN, TOKEN_FILE

SHORTEST = 16
"""Characters of a token."""
_GIVE_A_TOKEN = (
    f"give every node the same {TOKEN} or {TOKEN_FILE} (openssl rand -hex 32 > token; chmod 600 token), "
    f"or a {JOB_DIR} that they share; in a scheduler's job a home directory on a network file system is enough"
)


def load_token(variables: Mapping[str, str], *, required: bool) -> str | None:
    """The token from the environment or its file; None if there is none.

    Raises TokenError if it is required and missing, if it is short, or if its file is unreadable or known to others.
    """
    if token := variables.get(TOKEN, "").strip():
        return _long_enough(token, TOKEN)
    if path := variables.get(TOKEN_FILE, ""):
        source = f"{TOKEN_FILE}={path}"
        try:
            with Path(path).open(encoding="utf-8") as file:
                status, token = os.fstat(file.fileno()), file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise TokenError(f"{source} cannot be read: {reason}", hint=_GIVE_A_TOKEN) from error
        if known_to := _others_who_know(status):
            raise TokenError(
                f"{source} {known_to}", hint=f"chmod 600 {path}; for a Kubernetes secret: defaultMode: 0400"
            )
        if not token:
            raise TokenError(f"{source} is empty", hint=_GIVE_A_TOKEN)
        return _long_enough(token, source)
    if required:
        raise TokenError(f"the nodes share no token: neither {TOKEN} nor {TOKEN_FILE} is set", _GIVE_A_TOKEN)
    return None


def _others_who_know(status: os.stat_result) -> str:
    """Who else may read or write the file with the token, as a clause; empty if nobody does.

    Root may own it, and let a group read it: so Kubernetes hands a secret to a user of a container. Root itself reads
    the files of any user whose container this is.
    """
    mode, user = status.st_mode & 0o777, os.getuid()
    if user and status.st_uid not in (0, user):
        return f"belongs to another user (uid {status.st_uid})"
    of_root = user and status.st_uid == 0
    if mode & (0o037 if of_root else 0o077):
        return f"can be read by others (mode {mode:o})"
    return ""


def _long_enough(token: str, source: str) -> str:
    """The token. Raises TokenError for a short one: whoever sees one handshake can try all of them."""
    if len(token) < SHORTEST:
        raise TokenError(
            f"{source} has {len(token)} characters; a token needs at least {SHORTEST}",
            f"make one with `openssl rand -hex 32` on one machine, and set the same {TOKEN} on every node",
        )
    return token


def make_token() -> str:
    """A new random token."""
    return secrets.token_hex(32)


def nonce() -> str:
    """A new random challenge."""
    return secrets.token_hex(32)


def proof(token: str, role: str, nonces: tuple[str, str], *claims: str | int) -> str:
    """HMAC-SHA256 over the speaker's role, both nonces and the speaker's claims.

    The role prevents replaying a head's proof as a worker's; the nonces prevent replaying old proofs.
    """
    return _hmac(token, "proof", role, *nonces, *claims).hex()


def session_key(token: str, role: str, nonces: tuple[str, str]) -> bytes:
    """The key of the messages that this role sends on this connection."""
    return _hmac(token, "session", role, *nonces)


def ray_token(token: str, launch_id: str) -> str:
    """Ray's token for this launch. It does not reveal the shared secret."""
    return hmac.new(token.encode(), f"ray {launch_id}".encode(), hashlib.sha256).hexdigest()


def _hmac(token: str, *statement: str | int) -> bytes:
    return hmac.digest(token.encode(), json.dumps(statement).encode(), "sha256")
