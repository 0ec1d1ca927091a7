"""The command `publish`."""

import sys
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from buildkit.commands.arguments import command
from buildkit.commands.options import (
    AsJson,
    BaseChoice,
    Project,
    RegistryCa,
    SigningKey,
    SmokeTestArguments,
    VariantName,
    emit,
    errors,
    open_matrix,
)
from buildkit.errors import UsageError
from buildkit.host.accelerators import ACCELERATORS
from buildkit.images.archive import ESTARGZ
from buildkit.publishing import provenance
from buildkit.publishing.check import ATTACHMENTS
from buildkit.publishing.publish import ReleaseRequest, check_access, publish_images, tags_for
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.registry.compression import COMPRESSIONS
from buildkit.registry.reference import Reference, parse_reference
from buildkit.registry.signature import Signer
from buildkit.running.engine import Docker

FORMS = (*COMPRESSIONS, ESTARGZ)


@dataclass(frozen=True, kw_only=True)
class PublishArguments:
    target: Annotated[
        list[str],
        typer.Option(
            "--target",
            "-t",
            metavar="TARGET[:VARIANT]",
            help=f"{', '.join(ACCELERATORS)}, or all of them: `all`. Repeatable; several are one release, and none "
            "is public before the last one is signed.",
        ),
    ]
    registry: Annotated[
        str, typer.Option(envvar="SLIPWAY_REGISTRY", help="HOST[:PORT]/REPOSITORY; http:// before it for a plain one.")
    ]
    variant: VariantName = None
    key: SigningKey = None
    keyless: Annotated[
        bool, typer.Option("--keyless", envvar="SLIPWAY_SIGN_KEYLESS", help="Sign as this CI job, in Sigstore's log.")
    ] = False
    registry_ca: RegistryCa = None
    base: BaseChoice = "auto"
    compression: Annotated[
        str,
        typer.Option(
            help=f"Of the layers: {', '.join(FORMS)}. Docker before 23 and containerd before 1.5 read gzip "
            "only. estargz is gzip from which stargz-snapshotter starts a container before it has the whole image."
        ),
    ] = "zstd"
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and ask nobody.")] = False
    as_json: AsJson = False
    project: Project = None
    pytest_arguments: SmokeTestArguments = field(default_factory=list)

    def check(self) -> Reference:
        """The repository. Raises `UsageError` for arguments that contradict each other."""
        if bool(self.key) == self.keyless:
            raise UsageError(
                "a key and keyless exclude each other" if self.key else "no signing method",
                "name --key cosign.key (`cosign generate-key-pair` makes one), or --keyless in a CI job",
            )
        if self.compression not in FORMS:
            raise UsageError(
                f"--compression {self.compression}: unknown compression",
                f"one of: {', '.join(FORMS)}; runtimes that fetch single files read {ESTARGZ}",
            )
        repository = parse_reference(self.registry)
        if repository.tag or repository.digest:
            raise UsageError(f"--registry {self.registry} names a tag", f"tags are made here: write {repository.name}")
        return repository


@command
def publish(arguments: PublishArguments) -> None:
    """Build, test, push, pull back and test, attach, sign, check and promote images; run again to finish."""
    repository = arguments.check()
    matrix = open_matrix(arguments.project)
    requests = [
        ReleaseRequest(
            matrix=matrix,
            variant=chosen,
            repository=repository,
            signer=Signer(arguments.key or ""),
            ca=arguments.registry_ca,
            base=arguments.base,
            compression=arguments.compression,
            pytest_arguments=tuple(arguments.pytest_arguments),
        )
        for chosen in chosen_variants(matrix, arguments.target, arguments.variant)
    ]
    if arguments.dry_run:
        emit_each([describe(request) for request in requests])
        return
    check_access(requests[0])
    publications = publish_images(requests, Docker())
    if arguments.as_json:
        emit_each([asdict(publication) for publication in publications])
        return
    for publication in publications:
        errors.print(f"published in {publication.seconds:.0f} s: {publication.repository}@{publication.digest}")
        for tag in publication.tags:
            sys.stdout.write(f"{publication.repository}:{tag}\n")


def chosen_variants(matrix: Matrix, names: list[str], variant: str | None) -> list[Variant]:
    """The variants that `--target` and `--variant` name, each once. Raises `UsageError`."""
    if names == ["all"]:
        names = list(matrix.targets)
    if variant and (len(names) > 1 or ":" in names[0]):
        raise UsageError(
            "--variant belongs to one --target", "write --target TARGET:VARIANT for each image of the release"
        )
    parts = [name.partition(":") for name in names]
    chosen = [matrix.variant(target, variant or named or None) for target, _, named in parts]
    return list({entry.identifier: entry for entry in chosen}.values())


def emit_each(documents: list[dict[str, Any]]) -> None:
    """One document for one image, and a list for several."""
    emit(documents[0] if len(documents) == 1 else documents)


def describe(request: ReleaseRequest) -> dict[str, Any]:
    """The plan of `--dry-run`. The digest in the tags is that of the image, which exists only after its build."""
    tags = tags_for(request, "IMAGE")
    return {
        "target": request.variant.target,
        "variant": request.variant.name,
        "status": request.variant.image_status,
        "repository": request.repository.name,
        "staging": tags.staging,
        "tags": list(tags.promoted),
        "attachments": {kind: media_type for kind, (media_type, _) in ATTACHMENTS.items()}
        | ({} if request.signer.key else {"provenance": provenance.MEDIA_TYPE}),
        "compression": request.compression,
        "sign": request.signer.arguments(),
    }
