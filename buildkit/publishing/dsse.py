"""Signed in-toto statements: DSSE envelopes (https://github.com/secure-systems-lab/dsse/blob/master/protocol.md).

`cosign verify-blob-attestation --key cosign.pub --insecure-ignore-tlog=true --signature FILE --type TYPE
--check-claims=false` checks one without this project.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buildkit.errors import TrustError
from buildkit.publishing.signature import Signer, cosign, public_key, reason, sign_bytes

PAYLOAD_TYPE = "application/vnd.in-toto+json"
NO_ENVELOPE = "this file is no DSSE envelope with an in-toto statement"


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
    """SHA-256 of a public key in DER, in hexadecimal; an envelope names its signer's key so."""
    body = "".join(line for line in pem.splitlines() if not line.startswith("-----"))
    return hashlib.sha256(base64.b64decode(body)).hexdigest()


def open_envelope(content: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The statement, and the keys that claim to have signed it. Checks no signature. Raises `TrustError`."""
    try:
        envelope = json.loads(content)
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise TrustError(NO_ENVELOPE, f"its payloadType is not {PAYLOAD_TYPE}")
        statement = json.loads(base64.b64decode(envelope["payload"], validate=True))
        keys = tuple(str(entry["keyid"]) for entry in envelope["signatures"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrustError(f"{NO_ENVELOPE}: {error!r}", "write it with `buildkit certify`") from error
    if not isinstance(statement, dict):
        raise TrustError(NO_ENVELOPE, "write it with `buildkit certify`")
    return statement, keys


def check_signature(envelope: Path, key: Path, predicate_type: str) -> None:
    """Raises `TrustError` unless this public key signed the statement, `SignatureError` without cosign."""
    options = ["--insecure-ignore-tlog=true", "--check-claims=false", "--type", predicate_type]
    done = cosign(["verify-blob-attestation", "--key", str(key), *options, "--signature", str(envelope)])
    if done.returncode != 0:
        raise TrustError(f"the key {key.name} did not sign it: {reason(done)}", "do not trust this file")
