"""`buildkit run`, `slurm` and `build` with a warm cache: where it is mounted, baked or refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.commands.job import warm_folder as folder_for_job
from buildkit.errors import UsageError, WarmCacheError
from buildkit.host.accelerators import Gpus
from buildkit.host.machine import read_machine
from buildkit.images.build import warm_folder as folder_for_build
from buildkit.recipe.dockerfile import render_dockerfile
from buildkit.recipe.lock_file import find_lock, template_digest
from buildkit.recipe.matrix import Matrix
from buildkit.running.engine import ContainerEngine, LocalImage
from buildkit.running.flags import RunRequest
from buildkit.warming.archive import pack
from buildkit.warming.cache import MANIFEST, PLACE, Key, WarmCache
from buildkit.warming.source import Source, open_cache
from buildkit.warming.warm import private_words
from tests.buildkit.test_cli import buildkit
from tests.buildkit.warming.conftest import H200, LOCK

FORMATS = ("docker", "podman", "apptainer", "enroot", "compose", "kubernetes", "slurm")


class EngineWithImage(ContainerEngine):
    """Knows one image, with a lock in its labels."""

    def __init__(self, lock: str) -> None:
        self.lock = lock

    def build_command(self, request: object) -> list[str]:
        raise NotImplementedError

    def find(self, _reference: str) -> LocalImage | None:
        return LocalImage("sha256:1", 1, {"dev.slipway.lock": self.lock})


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for caches, where archives are unpacked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user"


@pytest.fixture
def fitting(left: Path, matrix: Matrix, tmp_path: Path) -> Path:
    """A warm cache for the lock of the cuda target."""
    variant = matrix.variant("cuda")
    path = tmp_path / "fitting.tar.zst"
    key = replace(H200, lock=f"sha256:{find_lock(matrix, variant).digest}")
    pack(left, WarmCache(key, "cuda", variant.name, 0, 0), path)
    return path


@pytest.mark.parametrize("shown", FORMATS)
def test_every_format_mounts_the_unpacked_cache(fitting: Path, caches: Path, shown: str) -> None:
    done = buildkit("run", "--target", "cuda", "--warm", str(fitting), "--print", shown, XDG_CACHE_HOME=str(caches))
    assert done.returncode == 0, done.stderr
    (folder,) = (caches / "slipway" / "warm").iterdir()
    assert (folder / MANIFEST).is_file()
    assert str(folder) in done.stdout
    assert PLACE in done.stdout


@pytest.mark.parametrize("container", ["docker", "podman", "apptainer", "enroot", "pyxis"])
def test_every_runtime_of_a_batch_script_mounts_it(fitting: Path, caches: Path, container: str) -> None:
    words = ("slurm", "--target", "cuda", "--warm", str(fitting), "--container", container)
    done = buildkit(*words, XDG_CACHE_HOME=str(caches))
    assert done.returncode == 0, done.stderr
    assert f":{PLACE}:ro" in done.stdout


def test_a_batch_script_without_container_refuses_it(fitting: Path, caches: Path) -> None:
    words = ("slurm", "--target", "cuda", "--warm", str(fitting), "--container", "none")
    done = buildkit(*words, XDG_CACHE_HOME=str(caches))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--warm needs a container" in done.stderr


def test_a_cache_of_another_lock_is_refused_with_the_reason(archive: Path, caches: Path) -> None:
    words = ("run", "--target", "cuda", "--warm", str(archive), "--print", "docker")
    done = buildkit(*words, XDG_CACHE_HOME=str(caches))
    assert (done.returncode, done.stdout) == (26, "")
    assert "lock aaaaaaaaaaaa, and the image has lock" in done.stderr


def test_a_job_on_this_machine_needs_a_cache_of_these_gpus(archive: Path, caches: Path, matrix: Matrix) -> None:
    variant, machine = matrix.variant("cuda"), read_machine()
    here = replace(machine, gpus={**machine.gpus, "cuda": Gpus(1, "580.65.06", models=("NVIDIA H200",))})
    other = replace(machine, gpus={**machine.gpus, "cuda": Gpus(1, "580.65.06", models=("NVIDIA A100",))})
    engine = EngineWithImage(LOCK)
    assert (folder_for_job(Source(str(archive)), matrix, variant, "slipway:cuda", here, engine) / MANIFEST).is_file()
    with pytest.raises(WarmCacheError, match="on NVIDIA H200, and this machine has NVIDIA A100"):
        folder_for_job(Source(str(archive)), matrix, variant, "slipway:cuda", other, engine)
    with pytest.raises(WarmCacheError, match="and the image has lock bbbbbbbbbbbb"):
        folder_for_job(
            Source(str(archive)), matrix, variant, "slipway:cuda", here, EngineWithImage("sha256:" + "b" * 64)
        )


def test_an_image_gets_a_cache_of_its_lock_alone(fitting: Path, archive: Path, caches: Path, matrix: Matrix) -> None:
    variant = matrix.variant("cuda")
    lock = find_lock(matrix, variant)
    assert (folder_for_build(Source(str(fitting)), variant, lock) / MANIFEST).is_file()
    with pytest.raises(WarmCacheError, match="and the image has lock"):
        folder_for_build(Source(str(archive)), variant, lock)


def test_the_layer_lies_before_the_code_and_leaves_the_lock_alone(matrix: Matrix) -> None:
    variant = matrix.variant("cuda")
    before = template_digest(matrix, variant)
    plain, warm = (render_dockerfile(matrix, variant, "registry", {"a": "b"}, warm=warm) for warm in (False, True))
    lines = [line for line in warm.splitlines() if line.startswith(("COPY", "ENTRYPOINT"))]
    assert lines[:3] == [
        'ENTRYPOINT ["tini", "-g", "--", "launch"]',
        f"COPY warm {PLACE}",
        "COPY launch /opt/slipway/venv/bin/launch",
    ]
    assert "COPY warm" not in plain
    assert find_lock(matrix, variant).template == before


@pytest.mark.parametrize("source", ["absent.tar.zst", "./absent", "Not A Name"])
def test_a_source_that_is_neither_file_nor_repository_is_named(tmp_path: Path, source: str) -> None:
    with pytest.raises(UsageError, match=f"--warm {source}: there is no such file"):
        open_cache(Source(source), tmp_path, "cuda", Key(LOCK, (), ""))


@pytest.mark.parametrize("name", ["registry.example.com/team/warm", "registry.example.com/team/warm:tag"])
def test_a_tag_without_a_key_is_refused_because_it_can_be_moved(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="a tag can be moved") as caught:
        open_cache(Source(name), tmp_path, "cuda", Key(LOCK, (), ""))
    assert "--warm-key cosign.pub" in str(caught.value.hint)


def test_a_key_never_seems_to_vouch_for_a_file(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a file, and only what lies in a registry is signed"):
        open_cache(Source(str(archive), "cosign.pub"), tmp_path / "unpacked", "cuda", Key(LOCK, (), ""))
    assert not (tmp_path / "unpacked").exists()


def test_paths_secrets_and_values_of_the_run_are_private() -> None:
    request = RunRequest(
        "slipway:cpu", "cpu", ("train",), volumes=("/tmp/slipway-warm-1/run:/warm", "/home/anna/data:/data:ro"),
        environment=("SLIPWAY_CACHE_DIR=/tmp/slipway-0", "HF_TOKEN=hf_verysecret", "DEBUG=1"),
    )  # fmt: skip
    words = set(private_words(request, "/tmp/slipway-warm-1"))
    assert {"/home/anna/data", "/tmp/slipway-warm-1", "hf_verysecret", request.token} <= words
    assert not {"1", "/tmp/slipway-0"} & words
