"""Signed in-toto statements: DSSE envelopes (https://github.com/secure-systems-lab/dsse/blob/master/protocol.md).

`cosign verify-blob-attestation --key cosign.pub --insecure-ignore-tlog=true --signature FILE --type TYPE
--check-claims=false` checks one without this project.
"""

import base64
import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buildkit.errors import TrustError
from buildkit.registry.signature import Signer, cosign, public_key, reason, sign_bytes

PAYLOAD_TYPE = "application/vnd.in-toto+json"
MEDIA_TYPE = "application/vnd.dsse.envelope.v1+json"


def seal(statement: Mapping[str, Any], signer: Signer | None) -> bytes:
    """The envelope of a statement, as JSON; without a signer it has no signature. Raises `SignatureError`."""
    payload = json.dumps(statement, indent=1, sort_keys=True).encode()
    signatures = []
    if signer is not None:
        signed = sign_bytes(authentication_encoding(payload), signer)
        signatures.append({"keyid": key_id(public_key(signer)), "sig": signed})
    envelope = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": signatures,
    }
    return (json.dumps(envelope, indent=1) + "\n").encode()


def authentication_encoding(payload: bytes) -> bytes:
    """The bytes that are signed (PAE): type and payload, each with its length."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def key_id(pem: str) -> str:
    """SHA-256 of a public key in DER, in hexadecimal; an envelope names its key so. Raises `TrustError`."""
    body = "".join(line for line in pem.splitlines() if not line.startswith("-----"))
    try:
        return hashlib.sha256(base64.b64decode(body, validate=True)).hexdigest()
    except ValueError as error:
        raise TrustError("this is no public key in PEM", "`cosign generate-key-pair` writes cosign.pub") from error


def is_envelope(content: bytes) -> bool:
    """Whether a document claims to be an envelope. A bare statement does not."""
    try:
        return "payloadType" in json.loads(content)
    except (ValueError, TypeError, RecursionError):
        return False


def open_envelope(content: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The statement, and the keys that claim to have signed it. Checks no signature. Raises `TrustError`."""
    try:
        envelope = json.loads(content)
        kind, payload = envelope["payloadType"], base64.b64decode(envelope["payload"], validate=True)
        keys = tuple(str(entry["keyid"]) for entry in envelope["signatures"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrustError(f"this is no DSSE envelope: {error!r}", "do not trust this file") from error
    if kind != PAYLOAD_TYPE:
        raise TrustError(f"this DSSE envelope holds no in-toto statement, but {kind!r}", "do not trust this file")
    return payload, keys


def check_signature(content: bytes, key: str, predicate_type: str) -> None:
    """Raises `TrustError` unless this public key signed the envelope's statement, `SignatureError` without cosign."""
    options = ["--insecure-ignore-tlog=true", "--check-claims=false", "--type", predicate_type]
    with tempfile.NamedTemporaryFile(prefix="slipway-envelope-") as file:
        file.write(content)
        file.flush()
        done = cosign(["verify-blob-attestation", "--key", key, *options, "--signature", file.name])
    if done.returncode != 0:
        raise TrustError(f"the key {Path(key).name} did not sign it: {reason(done)}", "do not trust this file")
