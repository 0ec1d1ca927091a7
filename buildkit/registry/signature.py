"""Signs with cosign (https://docs.sigstore.dev/cosign/): by a key, or keyless with a CI job's identity.

One signature covers the image and its attachments: their digests are annotations, and cosign signs annotations too.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildkit.errors import SignatureError, TrustError, UsageError
from buildkit.registry.credentials import trusted_ca
from buildkit.registry.reference import Reference

DEADLINE = 180  # seconds for one run of cosign
HINT = "install cosign 2.5 or newer (Debian 13: `apt-get install cosign`; `ci/tools` puts it into build/tools/bin)"
NO_SIGNATURE = {10, 11, 12, 13}  # cosign's statuses: no image, no signature, none by this signer, no certificate
KEY_HINT = "`cosign generate-key-pair` makes a key; put its password into COSIGN_PASSWORD"


@dataclass(frozen=True)
class Signer:
    """`key` is a file or another value of cosign's --key (env://, awskms:// …); without it, cosign signs keyless.

    A key signs offline and writes to no public log. Keyless needs an identity token and writes to Sigstore's log.
    """

    key: str = ""

    def arguments(self) -> list[str]:
        if self.key:
            return ["sign", "--yes", "--key", self.key, "--tlog-upload=false"]
        return ["sign", "--yes"]


@dataclass(frozen=True)
class Trust:
    """The trusted signer: a public key, or an identity and its issuer in Sigstore's log.

    With `pattern`, identity and issuer are regular expressions.
    """

    key: str = ""
    identity: str = ""
    issuer: str = ""
    pattern: bool = False

    def __post_init__(self) -> None:
        by_key, by_identity = bool(self.key), bool(self.identity or self.issuer)
        if by_key == by_identity or bool(self.identity) != bool(self.issuer):
            raise UsageError(
                "exactly one trusted signer must be named",
                "name either --key cosign.pub, or --certificate-identity URL and --certificate-oidc-issuer URL",
            )

    def arguments(self) -> list[str]:
        if self.key:
            return ["verify", "--key", self.key, "--insecure-ignore-tlog=true"]
        suffix = "-regexp" if self.pattern else ""
        identity = [f"--certificate-identity{suffix}", self.identity]
        return ["verify", *identity, f"--certificate-oidc-issuer{suffix}", self.issuer]


def sign(reference: Reference, signer: Signer, annotations: Mapping[str, str], ca: Path | None = None) -> None:
    """Signs a manifest, named by digest, and the annotations. Raises `SignatureError`."""
    marks = [part for name, value in sorted(annotations.items()) for part in ("-a", f"{name}={value}")]
    done = cosign([*signer.arguments(), *marks, *connection(reference, ca), str(reference)])
    if done.returncode != 0:
        raise SignatureError(
            f"cosign could not sign {reference}: {reason(done)}",
            "check the key and COSIGN_PASSWORD; keyless needs an identity token (GitHub: `id-token: write`)",
        )


def signed_annotations(reference: Reference, trust: Trust, ca: Path | None = None) -> list[dict[str, str]]:
    """The annotations of every trusted signature of this manifest.

    Raises `TrustError` when there is none, and `SignatureError` when cosign could not tell.
    """
    done = cosign([*trust.arguments(), "--output=json", *connection(reference, ca), str(reference)])
    whom = f"the key {trust.key}" if trust.key else trust.identity
    if done.returncode in NO_SIGNATURE:
        raise TrustError(f"no signature by {whom}: {reason(done)}", "do not use it")
    if done.returncode != 0:
        raise SignatureError(
            f"cosign could not look for a signature by {whom}: {reason(done)}",
            "the image was not judged; check the key's name and that cosign reaches the registry",
        )
    payloads = json.loads(done.stdout)
    return [
        payload.get("optional") or {}
        for payload in payloads
        if payload["critical"]["image"]["docker-manifest-digest"] == reference.digest
    ]


def sign_bytes(content: bytes, signer: Signer) -> str:
    """A key's signature of these bytes, in base64. Raises `SignatureError`."""
    with tempfile.NamedTemporaryFile(prefix="slipway-sign-") as file:
        file.write(content)
        file.flush()
        done = cosign(["sign-blob", "--yes", "--key", signer.key, "--tlog-upload=false", file.name])
    if done.returncode != 0:
        raise SignatureError(f"cosign could not sign: {reason(done)}", KEY_HINT)
    return done.stdout.strip()


def public_key(signer: Signer) -> str:
    """The public half of a signer's key, as PEM."""
    done = cosign(["public-key", "--key", signer.key])
    if done.returncode != 0:
        raise SignatureError(
            f"the key {signer.key} cannot be used: {reason(done)}",
            KEY_HINT,
        )
    return done.stdout


def connection(reference: Reference, ca: Path | None) -> list[str]:
    if not reference.secure:
        return ["--allow-http-registry"]
    authority = trusted_ca(reference.host, ca)
    return ["--registry-cacert", str(authority)] if authority else []


def cosign(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("cosign")
    if binary is None:
        raise SignatureError("cosign is not installed", HINT)
    environment = {**os.environ, "COSIGN_PASSWORD": os.environ.get("COSIGN_PASSWORD", "")}
    try:
        return subprocess.run(
            [binary, *arguments], capture_output=True, text=True, check=False, timeout=DEADLINE, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise SignatureError(
            f"cosign {arguments[0]} did not end within {DEADLINE} s",
            "check that this host reaches the registry and, for keyless signing, Sigstore",
        ) from error


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """cosign's reason for a failure: its first `Error:` line, or its last line."""
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return (errors or lines or [f"status {done.returncode}"])[0 if errors else -1]
