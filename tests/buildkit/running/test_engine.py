"""The engines' command lines, with fake docker and podman programs; tests/engines runs the real ones."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.errors import BuildError, EngineError, UsageError
from buildkit.running.engine import BuildRequest, Docker, Podman, full_name, open_engine

REQUEST = BuildRequest(Path("/context"), ("a:1", "b:2"), {"ca": Path("/s/ca")}, {"SOURCE_DATE_EPOCH": "1"}, True)


IMAGE = '[{"Id": "sha256:ab", "Size": 12, "Config": {"Labels": {"dev.slipway.target": "cpu"}}}]'


def play(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def docker(folder: Path, client: str = "26.1.5", buildx: bool = True) -> None:
    play(
        folder,
        "docker",
        f'case "$1 $2" in "info --format") echo /var/lib/docker;; "buildx version") exit {0 if buildx else 1};; '
        f'"version --format") echo {client};; "image inspect") echo \'{IMAGE}\';; *) exit 1;; esac',
    )


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("client", "buildx"), [("26.1.5", True), ("20.10.24", False)])
def test_a_fake_docker_builds_with_or_without_buildx(programs: Path, client: str, buildx: bool) -> None:
    docker(programs, client, buildx)
    command = Docker().build_command(REQUEST)
    assert ("buildx" in command) == buildx
    assert command[-1] == "/context"
    assert command[command.index("--tag") : command.index("--tag") + 4] == ["--tag", "a:1", "--tag", "b:2"]
    assert {"id=ca,src=/s/ca", "SOURCE_DATE_EPOCH=1", "--no-cache"} <= set(command)


def test_a_fake_client_that_needs_buildx_says_so(programs: Path) -> None:
    docker(programs, "28.2.2", buildx=False)
    with pytest.raises(EngineError) as caught:
        Docker().build_command(REQUEST)
    assert "28.2.2" in str(caught.value)
    assert "docker-buildx" in caught.value.hint


def test_estargz_layers_need_a_docker_with_containerds_image_store(programs: Path) -> None:
    for store, refused in (
        ("[[driver-type io.containerd.snapshotter.v1]]", False),
        ("[[Backing Filesystem ext]]", True),
    ):
        play(programs, "docker", f"echo '{store}'")
        with pytest.raises(EngineError) if refused else nullcontext() as caught:
            Docker().check_oci_output()
        if caught:
            assert "containerd-snapshotter" in caught.value.hint
    request = replace(REQUEST, tags=(), output="type=oci,dest=/d")
    command = Docker().build_command(request)
    assert command[command.index("--output") + 1] == "type=oci,dest=/d"
    assert "--load" not in command


def test_a_fake_podman_builds_with_the_commits_date(programs: Path) -> None:
    play(programs, "podman", "echo /var/lib/containers/storage")
    command = Podman().build_command(REQUEST)
    assert command[1] == "build"
    assert "--timestamp=1" in command
    assert {"id=ca,src=/s/ca", "a:1", "--no-cache"} <= set(command)


def test_auto_takes_the_first_fake_engine_that_answers(programs: Path) -> None:
    play(programs, "docker", "echo cannot connect >&2; exit 1")
    play(programs, "podman", "echo /var/lib/containers/storage")
    assert open_engine().name == "podman"
    docker(programs)
    assert open_engine().name == "docker"
    assert open_engine("podman").name == "podman"


def test_without_an_engine_every_fake_refusal_is_named(programs: Path) -> None:
    play(programs, "docker", "echo cannot connect >&2; exit 1")
    with pytest.raises(EngineError) as caught:
        open_engine()
    assert "docker: cannot connect" in str(caught.value)
    assert "podman is not installed" in str(caught.value)


def test_an_unknown_engine_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="lxc"):
        open_engine("lxc")


def test_an_image_has_digest_and_size_with_a_fake_docker(programs: Path) -> None:
    docker(programs)
    image = Docker().find("a:1")
    assert image is not None
    assert (image.id, image.size, image.labels) == ("sha256:ab", 12, {"dev.slipway.target": "cpu"})


@pytest.mark.parametrize(
    ("reference", "full"),
    [
        ("debian:bookworm-slim", "docker.io/library/debian:bookworm-slim"),
        ("rocm/vllm:1", "docker.io/rocm/vllm:1"),
        ("quay.io/a/b:1", "quay.io/a/b:1"),
        ("localhost/a", "localhost/a"),
        ("registry:5000/a", "registry:5000/a"),
    ],
)
def test_references_are_completed_as_docker_does(reference: str, full: str) -> None:
    assert full_name(reference) == full


def test_a_fake_docker_finds_the_proxys_password_in_its_environment_alone(programs: Path, tmp_path: Path) -> None:
    address = "http://me:hunter2@proxy.example"
    play(programs, "docker", f'echo "$*" >{tmp_path}/words; echo $https_proxy >{tmp_path}/proxy; exit 3')
    request = replace(REQUEST, build_args={"https_proxy": address, "SOURCE_DATE_EPOCH": "1"})
    engine = FakeDockerWithoutBuildx(str(programs / "docker"))
    with pytest.raises(BuildError) as caught:
        engine.build(request)
    words = (tmp_path / "words").read_text()
    assert "--build-arg https_proxy " in words
    assert "hunter2" not in words + str(caught.value)
    assert (tmp_path / "proxy").read_text().strip() == address


class FakeDockerWithoutBuildx(Docker):
    def __init__(self, binary: str) -> None:
        self.binary = binary

    def has_buildx(self) -> bool:
        return False

    def check_integrated(self) -> None:
        pass
