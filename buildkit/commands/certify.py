"""The command `certify`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from buildkit.certification.certificate import FAILED, NOT_DONE, Part, statement
from buildkit.certification.certify import certify_image
from buildkit.commands.arguments import command
from buildkit.commands.options import (
    ImageName,
    Project,
    SigningKey,
    SmokeTestArguments,
    TargetName,
    VariantName,
    errors,
    open_matrix,
)
from buildkit.errors import CertificateError, UsageError
from buildkit.images.test import require_pytest
from buildkit.publishing.dsse import seal
from buildkit.registry.signature import Signer, public_key
from buildkit.running.engine import open_engine


@dataclass(frozen=True, kw_only=True)
class CertifyArguments:
    target: TargetName
    variant: VariantName = None
    image: ImageName = None
    key: SigningKey = None
    unsigned: Annotated[
        bool, typer.Option("--unsigned", help="Do not sign: `buildkit targets` will not count the certificate.")
    ] = False
    output: Annotated[
        Path | None, typer.Option(help="File for the certificate. Default: TARGET-VARIANT-CHIP.json, here.")
    ] = None
    project: Project = None
    pytest_arguments: SmokeTestArguments = field(default_factory=list)

    def check(self) -> Signer | None:
        """The signer. Raises errors that would otherwise come after the trials."""
        if bool(self.key) == self.unsigned:
            raise UsageError(
                "a key and --unsigned exclude each other" if self.key else "no signing method",
                "name --key cosign.key (`cosign generate-key-pair` makes one), or --unsigned",
            )
        require_pytest()
        signer = Signer(self.key) if self.key else None
        if signer:
            public_key(signer)
        if self.output and not self.output.parent.is_dir():
            raise UsageError(
                f"--output {self.output}: there is no folder {self.output.parent}", "create it, or name another file"
            )
        return signer


@command
def certify(arguments: CertifyArguments) -> None:
    """Try a built image on this machine, and write a signed certificate of what it showed.

    Smoke tests, speed of the devices against their data sheets, two-rank PPO with agreement of engine and trainer,
    weight sync, sleep and wake: at most 15 minutes. A part that this machine has no room for, or no time left,
    is recorded as not done.
    """
    signer = arguments.check()
    matrix = open_matrix(arguments.project)
    chosen = matrix.variant(arguments.target, arguments.variant)
    name = arguments.image or f"slipway:{chosen.identifier}"
    certificate = certify_image(matrix, chosen, name, open_engine("docker"), tuple(arguments.pytest_arguments))
    path = arguments.output or Path(certificate.file_name)
    path.write_bytes(seal(statement(certificate), signer))
    sys.stdout.write(f"{path}\n")
    if missing := certificate.with_result(NOT_DONE):
        errors.print(escape(f"not done: {', '.join(part.name for part in missing)}"))
    if failures := certificate.with_result(FAILED):
        raise CertificateError(
            f"{certificate.identifier} failed on {certificate.hardware}: {by_reason(failures)}",
            f"{path} holds every figure; see the output above",
        )
    errors.print(f"certified in {certificate.seconds:.0f} s" if not certificate.rehearsal else "rehearsed on CPU")


def by_reason(parts: Sequence[Part]) -> str:
    """Parts that have one reason stand together."""
    reasons = dict.fromkeys(part.reason for part in parts)
    return "; ".join(
        f"{', '.join(part.name for part in parts if part.reason == reason)}: {reason}" for reason in reasons
    )
