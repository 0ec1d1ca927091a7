"""An image's content with fixed times: one commit and one lock give one digest, on every machine and engine.

An engine's own store keeps the times at which a build wrote the files. Here each file and each step of the history gets
the lock's date, as BuildKit's `rewrite-timestamp` does it where the engine has containerd's image store
(https://github.com/moby/buildkit/blob/master/docs/build-repro.md); this works with every engine that can save an image.
"""

import json
import os
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from buildkit.errors import BuildError
from buildkit.registry.compression import Compression, LayerSink, tar_of
from buildkit.registry.content import IMAGE, Descriptor, digest_of
from buildkit.running.engine import BuildRequest, ContainerEngine, Docker

CONFIG = "application/vnd.oci.image.config.v1+json"
XATTR = "SCHILY.xattr."  # extended attributes in a tar's headers, such as file capabilities
ESTARGZ = "estargz"
ESTARGZ_ANNOTATION = "containerd.io/snapshot/stargz/toc.digest"  # of a layer: the digest of its table of contents
OF_THE_ENGINE = ("container", "container_config", "docker_version", "id", "parent")  # of the configuration


@dataclass(frozen=True)
class FixedLayer:
    """`blob` describes the compressed file at `path`."""

    blob: Descriptor
    path: Path


@dataclass(frozen=True)
class ImageArchive:
    """An OCI image, ready to be pushed: layers in files, configuration and manifest as bytes."""

    layers: tuple[FixedLayer, ...]
    config: bytes
    manifest: bytes

    @property
    def image_id(self) -> str:
        """The digest of the configuration, which names the layers' tars: it does not depend on their compression."""
        return digest_of(self.config)

    def layer_file(self, number: int) -> BinaryIO:
        """The compressed tar of a layer; the base is layer 1."""
        return self.layers[number - 1].path.open("rb")

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)


@contextmanager
def fixed_archive(
    engine: ContainerEngine, image: str, epoch: int, cache: Path, compression: Compression
) -> Iterator[ImageArchive]:
    """The engine's image with all times set to `epoch` (seconds). Its files exist inside the `with` block only."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="archive-", dir=cache) as folder:
        saved = Path(folder, "saved.tar")
        done = engine.call("save", "--output", str(saved), image)
        if done.returncode != 0:
            raise BuildError(f"{engine.name} could not save {image}: {done.stderr.strip()}", "see its own message")
        yield fix_times(saved, Path(folder), epoch, compression)


@contextmanager
def estargz_archive(engine: Docker, request: BuildRequest, cache: Path) -> Iterator[ImageArchive]:
    """The image of a build with eStargz layers, which BuildKit writes; all times are the request's SOURCE_DATE_EPOCH.

    eStargz puts its table of contents into the tar, so the image has another id than with zstd or gzip. Raises
    `EngineError` without containerd's image store. https://docs.docker.com/build/exporters/oci-docker/
    """
    engine.check_oci_output()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="archive-", dir=cache) as folder:
        how = f"compression={ESTARGZ},force-compression=true,oci-mediatypes=true,rewrite-timestamp=true"
        engine.build(replace(request, tags=(), output=f"type=oci,tar=false,{how},dest={folder}"))
        yield read_layout(Path(folder))


def read_layout(folder: Path) -> ImageArchive:
    """The image of an OCI layout (https://github.com/opencontainers/image-spec/blob/main/image-layout.md)."""

    def blob(described: Any) -> Path:
        return folder / "blobs" / str(described["digest"]).replace(":", "/")

    manifest = blob(json.loads((folder / "index.json").read_bytes())["manifests"][0]).read_bytes()
    content = json.loads(manifest)
    config = blob(content["config"]).read_bytes()
    layers = (FixedLayer(Descriptor.read(layer), blob(layer)) for layer in content["layers"])
    return ImageArchive(tuple(layers), config, manifest)


def fix_times(saved: Path, folder: Path, epoch: int, compression: Compression) -> ImageArchive:
    """The image of an archive that `docker save` made; its layers are written into `folder`."""
    described = json.loads(read_member(saved, "manifest.json"))[0]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compression and digests run beside each other
        fixed = list(pool.map(partial(fix_layer, saved, folder, epoch, compression), enumerate(described["Layers"])))
    diff_ids, layers = [diff_id for diff_id, _ in fixed], tuple(layer for _, layer in fixed)
    config = fix_config(json.loads(read_member(saved, described["Config"])), diff_ids, epoch)
    manifest = {
        "schemaVersion": 2,
        "mediaType": IMAGE,
        "config": Descriptor(CONFIG, digest_of(config), len(config)).as_json(),
        "layers": [layer.blob.as_json() for layer in layers],
    }
    return ImageArchive(layers, config, encode(manifest))


def fix_config(config: dict[str, Any], diff_ids: list[str], epoch: int) -> bytes:
    created = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    kept = {
        name: value
        for name, value in config.items()
        if name not in OF_THE_ENGINE and not name.startswith("moby.buildkit.")
    }
    history = [{**entry, "created": created} for entry in config.get("history", [])]
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    return encode({**kept, "created": created, "history": history, "rootfs": rootfs})


def fix_layer(
    saved: Path, folder: Path, epoch: int, compression: Compression, numbered: tuple[int, str]
) -> tuple[str, FixedLayer]:
    """The digest of the tar with fixed times, and its compressed file."""
    number, name = numbered
    path = folder / f"layer-{number}"
    with tarfile.open(saved) as archive, path.open("wb") as file:
        layer, sink = archive.extractfile(name), LayerSink(file, compression.compressor())
        with tarfile.open(fileobj=tar_of(cast(BinaryIO, layer)), mode="r|") as source:
            for member in source:
                vars(source)["members"].clear()  # tarfile would keep them all
                sink.add(fix_member(member, epoch), source.extractfile(member) if member.isreg() else None)
        diff_id, blob = sink.finish(compression.media_type)
    return diff_id, FixedLayer(blob, path)


def fix_member(member: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    """Without what depends on the host: times, and the names that it has for numeric owners."""
    kept = copy(member)
    kept.mtime, kept.uname, kept.gname = epoch, "", ""
    kept.pax_headers = {name: value for name, value in member.pax_headers.items() if name.startswith(XATTR)}
    return kept


def read_member(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as opened:
        file = opened.extractfile(name)
        if file is None:
            raise BuildError(f"the saved image has no {name}", "run the same command again")
        return file.read()


def encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
