"""Warm caches in a registry: OCI artefacts, tagged by their key, and referrers of the image that they were made with.

https://github.com/opencontainers/image-spec/blob/main/manifest.md#guidelines-for-artifact-usage
"""

import hashlib
import shutil
from contextlib import closing
from pathlib import Path

from buildkit.errors import WarmCacheError
from buildkit.registry.client import Registry
from buildkit.registry.content import Descriptor
from buildkit.registry.reference import Reference
from buildkit.registry.signature import Signer, Trust, sign, signed_annotations
from buildkit.warming.archive import new_file, read_cache

ARTIFACT = "application/vnd.slipway.warm-cache.v1"
LAYER = f"{ARTIFACT}.tar+zstd"


def push(registry: Registry, archive: Path, signer: Signer | None = None, ca: Path | None = None) -> Reference:
    """Pushes the archive under a tag that tells its key, signs it if there is a signer, and returns its digest's name.

    If the registry's reference has a tag or a digest, it names an image, and the artefact refers to that. Raises
    `WarmCacheError` if there is no such image.
    """
    cache = read_cache(archive)
    image = registry.reference.digest or registry.reference.tag
    subject = registry.manifest(image) if image else None
    if image and subject is None:
        raise WarmCacheError(
            f"there is no image {registry.reference} for the warm cache to refer to",
            "publish the image first, or name the repository alone",
        )
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    layer = Descriptor(LAYER, f"sha256:{digest}", archive.stat().st_size)
    registry.put_file(archive, layer)
    annotations = {
        "dev.slipway.lock": cache.key.lock,
        "dev.slipway.target": cache.target,
        "dev.slipway.variant": cache.variant,
        "dev.slipway.devices": ", ".join(cache.key.devices),
        "dev.slipway.driver": cache.key.driver,
    }
    artifact = registry.put_artifact(layer, ARTIFACT, annotations, subject.descriptor if subject else None, cache.name)
    pushed = registry.reference.at(artifact.digest)
    if signer:
        sign(pushed, signer, {}, ca)
    return pushed


def pull(registry: Registry, name: str, folder: Path, trust: Trust | None = None, ca: Path | None = None) -> Path:
    """The archive of the artefact with this tag or digest, kept in `folder`.

    Raises `WarmCacheError` if it is none, `TrustError` without a signature by whom `trust` names.
    """
    where = f"{registry.reference.name}, {name}"
    manifest = registry.manifest(name)
    if manifest is None:
        raise WarmCacheError(
            f"there is no warm cache {where}", "push one: `buildkit warm --push` on a machine with these GPUs"
        )
    if trust:
        signed_annotations(registry.reference.at(manifest.descriptor.digest), trust, ca)
    layers = manifest.layers
    if manifest.content.get("artifactType") != ARTIFACT or [layer.media_type for layer in layers] != [LAYER]:
        raise WarmCacheError(f"{where} is no warm cache", "name the tag that `buildkit warm --push` printed")
    path = folder / f"{layers[0].digest.removeprefix('sha256:')}.tar.zst"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file, closing(registry.open_blob(layers[0])) as stream:
            shutil.copyfileobj(stream.as_file(), file)
            stream.check()
    return path
