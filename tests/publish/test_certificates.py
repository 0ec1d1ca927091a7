"""Certificates: the signed file, and which contributed files `buildkit targets` counts."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildkit.certification.certificate import Certificate, Hardware, Part, read_statement, statement
from buildkit.certification.contributed import read_certificates
from buildkit.errors import TrustError
from buildkit.publishing.dsse import seal
from buildkit.recipe.lock_file import find_lock
from buildkit.recipe.matrix import load_matrix
from buildkit.registry.signature import Signer
from tests.publish.conftest import ROOT
from tests.publish.test_commands import buildkit

VARIANT = "vllm0.32-torch2.13-cu130"
MATRIX = load_matrix(ROOT)
PARTS = ("smoke tests", "devices", "collectives", "two ranks", "agreement", "weight sync", "sleep and wake")


LOCK = f"sha256:{find_lock(MATRIX, MATRIX.variant('cuda', VARIANT)).digest}"


def certificate(**changes: Any) -> Certificate:
    values = {
        "image": "slipway:cuda",
        "digests": ("sha256:" + "1" * 64,),
        "target": "cuda",
        "variant": VARIANT,
        "lock": LOCK,
        "revision": "b" * 40,
        "version": "0.1.0",
        "date": "2026-11-23T10:00:00Z",
        "seconds": 400.0,
        "rehearsal": False,
        "hardware": Hardware("NVIDIA H200", 2, "580.65.06", 32, 256),
        "parts": tuple(Part(name, "passed") for name in PARTS),
    }
    return Certificate(**values | changes)


def test_a_stranger_checks_the_file_with_cosign_alone(tmp_path: Path, keys: Path, signer: Signer) -> None:
    file = tmp_path / "certificate.json"
    file.write_bytes(seal(statement(certificate()), signer))
    readme = (ROOT / "images" / "certificates" / "README.md").read_text()
    command = readme.partition("    cosign")[2].replace("\\\n", " ").split()
    words = [{"keys/NAME.pub": str(keys / "cosign.pub"), "FILE.json": str(file)}.get(word, word) for word in command]
    assert subprocess.run(["cosign", *words], capture_output=True, check=False).returncode == 0
    damaged = json.loads(file.read_text())
    damaged["payload"] = damaged["payload"][:-8] + "fQo="
    file.write_text(json.dumps(damaged))
    assert subprocess.run(["cosign", *words], capture_output=True, check=False).returncode != 0


def test_the_statement_holds_everything_and_is_read_back() -> None:
    wanted = certificate()
    document = statement(wanted)
    assert document["subject"] == [{"name": "slipway:cuda", "digest": {"sha256": "1" * 64}}]
    assert read_statement(json.dumps(document).encode()) == wanted
    assert wanted.file_name == f"cuda-{VARIANT}-nvidia-h200-x2.json"


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.update(predicateType="https://slsa.dev/provenance/v1"),
        lambda document: document["predicate"].pop("lock"),
        lambda document: document["predicate"].update(more=1),
        lambda document: document["predicate"].update(rehearsal="no"),
        lambda document: document["predicate"].update(date="yesterday"),
        lambda document: document["predicate"].update(parts=[]),
        lambda document: document["predicate"]["parts"][0].update(result="splendid"),
        lambda document: document["predicate"].update(hardware=None),
        lambda document: document.update(subject=[]),
    ],
)
def test_a_statement_of_another_form_is_refused(damage: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(json.dumps(statement(certificate())))
    damage(document)
    with pytest.raises(TrustError):
        read_statement(json.dumps(document).encode())


# ---- `buildkit targets` ----------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, keys: Path) -> Path:
    """A copy of the project's data, with alice's key among the known ones."""
    shutil.copytree(ROOT / "images", tmp_path / "images")
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    shutil.copy2(keys / "cosign.pub", tmp_path / "images" / "certificates" / "keys" / "alice.pub")
    return tmp_path


def contribute(checkout: Path, given: Certificate, signer: Signer | None) -> None:
    (checkout / "images" / "certificates" / given.file_name).write_bytes(seal(statement(given), signer))


def shown(checkout: Path) -> tuple[str, str]:
    """The table and the messages of `buildkit targets`."""
    done = buildkit("targets", "--project", str(checkout))
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split()), done.stderr


def test_a_certificate_takes_the_place_of_untested(checkout: Path, signer: Signer) -> None:
    parts = tuple(
        replace(part, result="not done") if part.name == "two ranks" else part for part in certificate().parts
    )
    contribute(checkout, certificate(parts=parts), signer)
    (contributed,) = read_certificates(load_matrix(checkout))
    assert (
        contributed.summary
        == "certified, 2026-11-23 on 2 x NVIDIA H200, driver 580.65.06 by alice; not done: two ranks"
    )
    assert "certified, 2026-11-23 on 2 x NVIDIA H200" in shown(checkout)[0]
    entries = json.loads(buildkit("targets", "--project", str(checkout), "--json").stdout)
    (entry,) = [entry for entry in entries if entry["certificates"]]
    assert (entry["target"], entry["variant"]) == ("cuda", VARIANT)
    (told,) = entry["certificates"]
    assert (told["signer"], told["current"], told["problem"]) == ("alice", True, "")


def test_a_certificate_of_another_lock_is_shown_as_such(checkout: Path, signer: Signer) -> None:
    contribute(checkout, certificate(lock="sha256:" + "0" * 64), signer)
    assert "certified with an older lock, 2026-11-23" in shown(checkout)[0]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (certificate(rehearsal=True), "it is a rehearsal on CPU"),
        (certificate(parts=(Part("agreement", "failed", "differ"),)), "it shows a failure: agreement: differ"),
        (certificate(parts=(Part("agreement", "passed"),)), "it does not show: smoke tests, weight sync"),
        (certificate(variant="vllm9"), "there is no variant of cuda `vllm9`"),
    ],
)
def test_a_signed_certificate_that_proves_nothing_does_not_count(
    checkout: Path, signer: Signer, given: Certificate, problem: str
) -> None:
    contribute(checkout, given, signer)
    table, said = shown(checkout)
    assert "certified" not in table
    assert f"{given.file_name} does not count: {problem}" in said


def test_only_a_known_key_makes_a_certificate_count(checkout: Path, keys: Path, signer: Signer) -> None:
    contribute(checkout, certificate(), None)
    assert read_certificates(load_matrix(checkout))[0].problem == "it is not signed"
    contribute(checkout, certificate(), signer)
    assert read_certificates(load_matrix(checkout))[0].problem == ""
    (checkout / "images" / "certificates" / "keys" / "alice.pub").unlink()
    assert "no key in images/certificates/keys" in read_certificates(load_matrix(checkout))[0].problem


def test_a_damaged_key_is_named_and_the_others_count(checkout: Path, signer: Signer) -> None:
    contribute(checkout, certificate(), signer)
    (checkout / "images" / "certificates" / "keys" / "bob.pub").write_bytes(b"\xff not a key")
    table, said = shown(checkout)
    assert "by alice" in table
    assert said == "bob.pub does not count: this is no public key in PEM\n"


def test_changed_figures_break_the_signature(checkout: Path, signer: Signer) -> None:
    honest = seal(statement(certificate(rehearsal=True)), signer)
    forged = json.loads(seal(statement(certificate()), None))
    forged["signatures"] = json.loads(honest)["signatures"]
    (checkout / "images" / "certificates" / "forged.json").write_text(json.dumps(forged))
    (contributed,) = read_certificates(load_matrix(checkout))
    assert "alice.pub did not sign it" in contributed.problem
    assert contributed.certificate == certificate()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"payloadType": 1}', b"[" * 100_000, b"\xff"])
def test_a_file_that_is_no_certificate_does_not_count(checkout: Path, content: bytes) -> None:
    (checkout / "images" / "certificates" / "damaged.json").write_bytes(content)
    assert "no DSSE envelope" in read_certificates(load_matrix(checkout))[0].problem


def test_without_cosign_no_certificate_counts(
    checkout: Path, signer: Signer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contribute(checkout, certificate(), signer)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_certificates(load_matrix(checkout))[0].problem == "cosign is not installed"


def test_a_variant_for_another_platform_gets_a_row_of_its_own(checkout: Path, signer: Signer) -> None:
    contribute(checkout, certificate(variant=f"{VARIANT}-arm64"), signer)
    table, said = shown(checkout)
    assert f"{VARIANT}-arm64 certified with an older lock" in table
    assert said == ""


def test_the_newest_certificate_of_the_present_lock_comes_first(checkout: Path, signer: Signer) -> None:
    other = replace(certificate().hardware, device="NVIDIA B200")
    contribute(checkout, certificate(lock="sha256:0", date="2026-12-01T00:00:00Z", hardware=other), signer)
    contribute(checkout, certificate(), signer)
    assert "certified, 2026-11-23 on 2 x NVIDIA H200" in shown(checkout)[0]


def test_every_certificate_of_the_project_counts() -> None:
    assert [entry.problem for entry in read_certificates(MATRIX) if entry.problem] == []
