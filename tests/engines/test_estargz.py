"""BuildKit writes eStargz layers, the same bytes twice, and docker pulls and runs them. Everything here is real.

The image holds one program of this host and its libraries. Needs containerd's image store:
`SLIPWAY_IMAGE_STORE=containerd ci/engine pytest tests/engines/test_estargz.py`.
"""

import json
import re
import shutil
import subprocess
import tarfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.errors import EngineError
from buildkit.images.archive import CONFIG, ESTARGZ_ANNOTATION, FixedLayer, estargz_archive
from buildkit.images.build import BuildResult
from buildkit.images.reproduce import rebuild
from buildkit.publishing.check import find_image
from buildkit.publishing.inventory import apply_layer
from buildkit.publishing.publish import ReleaseRequest, archive_of
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import load_matrix
from buildkit.registry.client import Registry
from buildkit.registry.compression import tar_of
from buildkit.registry.content import IMAGE
from buildkit.registry.credentials import Credentials
from buildkit.registry.reference import Reference
from buildkit.registry.signature import Signer
from buildkit.running.engine import BuildRequest, Docker
from tests.buildkit.images.test_archive import EPOCH
from tests.buildkit.small_image import SmallProject, gateway, random_content
from tests.buildkit.stand_ins import Index
from tests.engines.conftest import need
from tests.publish.conftest import Server
from tests.serving import serving

TEXT = "read in the container\n"
DOCKERFILE = 'FROM scratch\nCOPY root /\nRUN ["cp", "/etc/text", "/etc/copy"]\nCMD ["cat", "/etc/copy"]\n'


@pytest.fixture
def engine() -> Docker:
    need("docker")
    engine = Docker()
    try:
        engine.check_oci_output()
    except EngineError as error:
        pytest.skip(str(error))
    return engine


@pytest.fixture
def recipe(tmp_path: Path) -> BuildRequest:
    context = tmp_path / "context"
    for program in ("cat", "cp"):
        path = shutil.which(program)
        assert path
        linked = subprocess.run(["ldd", path], check=True, capture_output=True, text=True).stdout
        for name in (path, *re.findall(r"/\S+", linked)):
            (context / f"root{name}").parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, context / f"root{name}")
    (context / "root/etc").mkdir()
    (context / "root/etc/text").write_text(TEXT)
    (context / "Dockerfile").write_text(DOCKERFILE)
    return BuildRequest(context, (), {}, {"SOURCE_DATE_EPOCH": str(EPOCH)}, no_cache=True)


def test_two_builds_give_one_image_with_fixed_times_which_docker_pulls_and_runs(
    engine: Docker, server: Server, recipe: BuildRequest, tmp_path: Path
) -> None:
    registry = Registry(Reference(server.host, "lazy", secure=False), Credentials())
    with ExitStack() as stack:
        archive, again = (stack.enter_context(estargz_archive(engine, recipe, tmp_path)) for _ in range(2))
        assert archive.digest == again.digest
        assert json.loads(archive.config)["created"] == "2026-11-23T00:00:00Z"
        for number, layer in enumerate(archive.layers, start=1):
            with archive.layer_file(number) as file, tarfile.open(fileobj=tar_of(file), mode="r|") as members:
                times = {member.mtime for member in members if not member.name.startswith("stargz.index")}
            assert times <= {EPOCH}
            registry.put_file(layer.path, layer.blob)
        registry.put_blob(archive.config, CONFIG)
        registry.put_manifest("estargz", archive.manifest, IMAGE)

    image = find_image(registry, "estargz")
    assert all(ESTARGZ_ANNOTATION in layer.annotations for layer in image.manifest.layers)
    blobs = (registry.open_blob(layer).as_file() for layer in image.manifest.layers)
    assert tuple(apply_layer({}, blob) for blob in blobs) == image.diff_ids

    name = f"{server.host}/lazy:estargz"
    pulled = engine.call("pull", name)
    assert pulled.returncode == 0, pulled.stderr
    try:
        ran = engine.call("run", "--rm", "--network", "none", name)
        assert ran.stdout == TEXT, ran.stderr
    finally:
        engine.call("rmi", name)


def test_publish_packs_the_image_that_it_built_and_a_rebuild_is_equal(
    engine: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = SmallProject(tmp_path / "small")
    project.write_wheels(random_content(4096))
    try:
        with serving(Index(project.wheels, gateway())) as index:
            built = project.buildkit("build", index.address, options=["--json"])
            assert built.returncode == 0, built.stderr
            for name, value in {"XDG_CACHE_HOME": str(project.cache), "UV_DEFAULT_INDEX": index.address}.items():
                monkeypatch.setenv(name, value)
            matrix = load_matrix(project.root)
            variant = matrix.variant("cpu", project.variant)
            nowhere = Reference("127.0.0.1:9", "slipway", secure=False)
            request = ReleaseRequest(matrix, variant, nowhere, Signer(""), compression="estargz")
            result = BuildResult(**{**json.loads(built.stdout), "base_changes": ()})
            with archive_of(result, request, engine, read_lock(matrix, variant).epoch) as archive:
                assert all(ESTARGZ_ANNOTATION in layer.blob.annotations for layer in archive.layers)
                config = json.loads(archive.config)
                local = engine.inspect(project.tag)
                assert local
                assert config["config"]["Labels"] == local["Config"]["Labels"]
                assert len(config["rootfs"]["diff_ids"]) == len(local["RootFS"]["Layers"])
                layers = (
                    FixedLayer(layer.blob, Path(shutil.copy(layer.path, tmp_path / layer.path.name)))
                    for layer in archive.layers
                )
                published = replace(archive, layers=tuple(layers))
            assert rebuild(matrix, variant, engine, "auto", published, estargz=True) is None
    finally:
        project.remove()
