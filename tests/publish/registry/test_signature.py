"""How cosign is called, which of its answers are accepted, and the errors when it cannot sign."""

import json
import os
from pathlib import Path

import pytest

from buildkit.errors import SignatureError, UsageError
from buildkit.registry.reference import Reference
from buildkit.registry.signature import Signer, Trust, public_key, sign, signed_annotations

IMAGE = Reference("127.0.0.1:1", "slipway", digest="sha256:" + "0" * 64)


def test_key_signs_offline_without_a_public_log() -> None:
    assert Signer("cosign.key").arguments() == ["sign", "--yes", "--key", "cosign.key", "--tlog-upload=false"]
    assert "--insecure-ignore-tlog=true" in Trust(key="cosign.pub").arguments()


def test_keyless_needs_the_log() -> None:
    assert Signer().arguments() == ["sign", "--yes"]
    trusted = Trust(identity="https://ci.example/job", issuer="https://ci.example").arguments()
    assert trusted == [
        "verify",
        "--certificate-identity",
        "https://ci.example/job",
        "--certificate-oidc-issuer",
        "https://ci.example",
    ]


@pytest.mark.parametrize(
    "values", [{}, {"identity": "a"}, {"issuer": "a"}, {"key": "a", "identity": "b", "issuer": "c"}]
)
def test_trust_needs_exactly_one_signer(values: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="exactly one trusted signer"):
        Trust(**values)


def test_invalid_identity_token_is_named(programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", "nonsense")
    with pytest.raises(SignatureError, match="compact JWS format must have three parts") as error:
        sign(IMAGE, Signer(), {})
    assert "id-token: write" in error.value.hint


def test_wrong_key_password_is_named(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    with pytest.raises(SignatureError, match="decrypt") as error:
        public_key(Signer(str(keys / "cosign.key")))
    assert "COSIGN_PASSWORD" in error.value.hint


def test_missing_cosign_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SignatureError, match="not installed") as error:
        sign(IMAGE, Signer("k"), {})
    assert "ci/tools" in error.value.hint


def test_signed_payload_of_another_digest_does_not_count_with_a_mocked_cosign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real cosign compares digests itself; a version that does not must not weaken verification."""
    payloads = [
        {"critical": {"image": {"docker-manifest-digest": digest}}, "optional": {"for": digest}}
        for digest in ("sha256:" + "1" * 64, IMAGE.digest)
    ]
    (tmp_path / "answer").write_text(json.dumps(payloads))
    (tmp_path / "cosign").write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    (tmp_path / "cosign").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert signed_annotations(IMAGE, Trust(key="cosign.pub")) == [{"for": IMAGE.digest}]
