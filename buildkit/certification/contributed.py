"""The certificates in `images/certificates`: contributed files, which count only with a signature of a known key."""

from dataclasses import dataclass
from pathlib import Path

from buildkit.certification.certificate import FAILED, NOT_DONE, PASSED, PREDICATE, Certificate, read_statement
from buildkit.certification.judge import AGREEMENT, SLEEP, WEIGHT_SYNC
from buildkit.certification.trials import SMOKE
from buildkit.errors import LockError, SignatureError, TrustError, UsageError
from buildkit.publishing.dsse import check_signature, key_id, open_envelope
from buildkit.recipe.lock_file import find_lock
from buildkit.recipe.matrix import Matrix, Variant

REQUIRED = (SMOKE, AGREEMENT, WEIGHT_SYNC, SLEEP)  # any machine with a GPU has room for these


@dataclass(frozen=True)
class Contributed:
    """A file with a certificate. It counts unless it has a `problem`; `signer` is the name of the key's file.

    `current`: the image had the lock that the variant has now.
    """

    path: Path
    certificate: Certificate | None = None
    signer: str = ""
    current: bool = False
    problem: str = ""

    @property
    def summary(self) -> str:
        """The status that `buildkit targets` shows for a certificate that counts."""
        if self.certificate is None:
            return ""
        lock = "" if self.current else " with an older lock"
        missing = ", ".join(part.name for part in self.certificate.with_result(NOT_DONE))
        rest = f"; not done: {missing}" if missing else ""
        return f"certified{lock}, {self.certificate.date[:10]} on {self.certificate.hardware} by {self.signer}{rest}"


def read_certificates(matrix: Matrix) -> list[Contributed]:
    """Every certificate of the project, and every unusable key; `problem` says why a file does not count."""
    folder = matrix.images / "certificates"
    keys: dict[str, Path] = {}
    unusable = []
    for path in sorted((folder / "keys").glob("*.pub")):
        try:
            keys[key_id(path.read_text(errors="replace"))] = path
        except TrustError as error:
            unusable.append(Contributed(path, problem=str(error)))
    return [*unusable, *(examine(path, keys, matrix) for path in sorted(folder.glob("*.json")))]


def examine(path: Path, keys: dict[str, Path], matrix: Matrix) -> Contributed:
    content = path.read_bytes()
    try:
        payload, claimed = open_envelope(content)
        certificate = read_statement(payload)
    except TrustError as error:
        return Contributed(path, problem=str(error))
    try:
        signer = trusted_signer(content, claimed, keys)
        refuse_unproven(certificate)
        current = has_current_lock(certificate, matrix)
    except (TrustError, SignatureError, UsageError, LockError) as error:
        return Contributed(path, certificate, problem=str(error))
    return Contributed(path, certificate, signer, current)


def trusted_signer(content: bytes, claimed: tuple[str, ...], keys: dict[str, Path]) -> str:
    """The name of the key that signed. Raises `TrustError` without one, `SignatureError` if cosign is not installed."""
    if not claimed:
        raise TrustError("it is not signed")
    known = [keys[name] for name in claimed if name in keys]
    if not known:
        raise TrustError("no key in images/certificates/keys signed it")
    check_signature(content, str(known[0]), PREDICATE)
    return known[0].stem


def refuse_unproven(certificate: Certificate) -> None:
    """Raises `TrustError` for a rehearsal, a failure, and a certificate without the parts that any GPU can show."""
    if certificate.rehearsal:
        raise TrustError("it is a rehearsal on CPU")
    if failures := certificate.with_result(FAILED):
        raise TrustError(f"it shows a failure: {failures[0].name}: {failures[0].reason}")
    passed = {part.name for part in certificate.with_result(PASSED)}
    if missing := [name for name in REQUIRED if name not in passed]:
        raise TrustError(f"it does not show: {', '.join(missing)}")


def has_current_lock(certificate: Certificate, matrix: Matrix) -> bool:
    """Raises `UsageError` for a variant that the matrix no longer has."""
    lock = find_lock(matrix, matrix.variant(certificate.target, certificate.variant))
    return certificate.lock == f"sha256:{lock.digest}"


def of_variant(certificates: list[Contributed], variant: Variant) -> list[Contributed]:
    """Those of a variant, with the current lock first, then from new to old."""
    matching = [
        entry for entry in certificates if entry.certificate and entry.certificate.identifier == variant.identifier
    ]
    newest = sorted(matching, key=lambda entry: entry.certificate.date if entry.certificate else "", reverse=True)
    return sorted(newest, key=lambda entry: not entry.current)
