"""The wheel in environments of its own, away from the checkout: both commands work, and `buildkit` finds its data."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from uv import find_uv_bin

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
Installed = Callable[..., subprocess.CompletedProcess[str]]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def check_output(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows, so that nothing else can get into the wheel."""
    folder = tmp_path_factory.mktemp("source")
    listing = check_output("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
    for name in listing.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build_wheel(source: Path, into: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", into, source]
    return run(*command, cwd=into)


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = build_wheel(source, folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = folder.glob("slipway_rl-*.whl")
    return wheel


def install(requirement: str, folder: Path) -> Path:
    """A virtual environment with the wheel and its dependencies, in the versions of the host's lock."""
    uv = find_uv_bin()
    check_output(uv, "venv", "--quiet", "--no-project", "--python", sys.executable, folder / "venv", cwd=folder)
    options = ["--quiet", "--python", folder / "venv", "--constraint", ROOT / "ci" / "requirements.txt"]
    check_output(uv, "pip", "install", *options, requirement, cwd=folder)
    return folder / "venv"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(str(wheel), tmp_path_factory.mktemp("environment"))


@pytest.fixture
def installed(environment: Path, tmp_path: Path) -> Installed:
    """Runs an installed command in an empty folder."""

    def start(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(environment / "bin" / name, *arguments, cwd=tmp_path)

    return start


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("buildkit --version", f"buildkit {VERSION}"),
        ("buildkit targets", "ray[default]=="),
        ("buildkit render --target cpu", 'ENTRYPOINT ["tini", "-g", "--", "launch"]'),
        ("buildkit plan --target cuda", "one NCCL or RCCL"),
        ("buildkit run --target cpu --print docker -- train", "docker run --rm"),
        ("buildkit run --target cuda --gpus 8 --print kubernetes -- train", '"nvidia.com/gpu": 8'),
        ("buildkit slurm --target rocm --nodes 2 -- train", "#SBATCH --nodes=2"),
        ("buildkit test --help", "smoke"),
        ("launch --version", f"launch {VERSION}"),
        ("launch explain", "single"),
    ],
)
def test_commands_work_outside_of_any_checkout(installed: Installed, command: str, words: str) -> None:
    done = installed(*command.split())
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert "Traceback" not in done.stderr


def test_tls_without_its_extra_says_what_to_install(environment: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from buildkit.recipe.project import own_project; sys.path.insert(0, str(own_project()))\n"
        "from entrypoints.errors import RayFailedError\n"
        "try:\n    import entrypoints.wire.certificates\n"
        "except RayFailedError as error:\n    print(error, error.hint)"
    )
    said = check_output(environment / "bin" / "python", "-c", code, cwd=tmp_path)
    assert "--tls needs the Python package cryptography" in said
    assert "pip install 'slipway-rl[tls]'" in said
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(requirement.startswith("cryptography") for requirement in project["optional-dependencies"]["tls"])


def test_the_build_context_holds_the_installed_code(environment: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from buildkit.recipe.matrix import load_matrix;"
        "from buildkit.recipe.project import find_project; from buildkit.recipe.lock_file import read_lock;"
        "from buildkit.host.settings import read_host; from buildkit.images.context import stage;"
        "matrix = load_matrix(find_project(None, Path.cwd())); variant = matrix.variant('cpu');"
        "stage(Path('context'), matrix, variant, read_lock(matrix, variant), 'registry', read_host({}))"
    )
    check_output(environment / "bin" / "python", "-c", code, cwd=tmp_path)
    app = tmp_path / "context" / "app"
    for package in ("entrypoints", "trainer"):
        files = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*") if "__pycache__" not in path.parts}
        assert {str(path.relative_to(app)) for path in (app / package).rglob("*")} == files
    assert (app / "images" / "chips.toml").is_file()
    assert json.loads((tmp_path / "context" / "image.json").read_text())["version"] == VERSION


def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    """`entrypoints` and `trainer` are names of other distributions of the index."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
    assert names == {"buildkit", f"slipway_rl-{VERSION}.dist-info"}


def test_launch_starts_the_trainer_and_shadows_no_module_of_the_users_folder(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "entrypoints.py").write_text("raise SystemExit('the wrong module')")
    assert f"launch {VERSION}" in check_output(environment / "bin" / "launch", "--version", cwd=tmp_path)
    code = "import importlib.util; print(importlib.util.find_spec('trainer').origin)"
    said = check_output(environment / "bin" / "launch", environment / "bin" / "python", "-c", code, cwd=tmp_path)
    assert Path(said.strip()).is_relative_to(environment)


@pytest.mark.parametrize("command", [["test"], ["certify", "--unsigned"]])
def test_container_tests_without_their_extra_say_what_to_install(installed: Installed, command: list[str]) -> None:
    done = installed("buildkit", *command, "--target", "cpu")
    assert done.returncode == 2
    assert "pytest, testinfra, pytest_timeout, not installed" in done.stderr
    assert "pip install 'slipway-rl[test]'" in done.stderr


@pytest.fixture(scope="module")
def with_trainer(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(f"{wheel}[trainer]", tmp_path_factory.mktemp("with-trainer"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("data arithmetic --output data", "data/train.parquet"),
        ("config --check --config dapo actor.learning_rate=1e-6", '"learning_rate": 1e-6'),
        ("config dpo", "dpo.beta="),
        ("report run", "run/report.html"),
        ("report run --curve curve.png", "curve.png"),
        ("report run other", "comparison.html"),
    ],
)
def test_the_trainers_commands_work_on_a_host_without_torch(
    with_trainer: Path, tmp_path: Path, arguments: str, words: str
) -> None:
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        rows = [{"step": step, "reward/mean": step / 10} for step in range(4)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert words in check_output(with_trainer / "bin" / "trainer", *arguments.split(), cwd=tmp_path)


@pytest.mark.parametrize("arguments", ["train model.path=m data.train_files=t", "dpo"])
def test_what_needs_torch_names_the_image(with_trainer: Path, tmp_path: Path, arguments: str) -> None:
    done = run(with_trainer / "bin" / "trainer", *arguments.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "needs the Python package torch, which is not installed" in done.stderr
    assert f"slipway:cpu python -m trainer {arguments}" in done.stderr
    assert "pip install" not in done.stderr
    assert "Traceback" not in done.stderr


def test_the_trainer_without_its_extra_says_what_to_install(installed: Installed) -> None:
    for arguments in ("config --check", "data arithmetic --output data", "train x=1"):
        done = installed("trainer", *arguments.split())
        assert done.returncode == 2
        assert "pip install 'slipway-rl[trainer]'" in done.stderr
        assert f"slipway:cpu python -m trainer {arguments}" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_container_tests_are_found(wheel: Path, tmp_path: Path) -> None:
    environment = install(f"{wheel}[test]", tmp_path)
    (project,) = environment.glob("lib/python*/site-packages/buildkit/project")
    command = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", project / "tests"]
    collected = check_output(environment / "bin" / "python", *command, cwd=tmp_path)
    assert "test_contents.py" in collected
    assert "test_two_nodes.py" in collected


def test_a_checkout_around_the_folder_comes_before_the_installed_data(environment: Path, project: Path) -> None:
    done = run(environment / "bin" / "buildkit", "targets", "--json", cwd=project)
    assert [entry["variant"] for entry in json.loads(done.stdout)] == ["small"]


def test_the_installed_locks_are_not_changed(installed: Installed) -> None:
    done = installed("buildkit", "lock", "--target", "cpu")
    assert done.returncode == 2
    assert "--project" in done.stderr


@pytest.mark.parametrize(
    ("module", "function", "argument"),
    [("cli", "main", "targets"), ("launch", "launch", "explain"), ("launch", "trainer", "config")],
)
def test_an_installation_without_its_data_says_what_is_missing(
    environment: Path, tmp_path: Path, module: str, function: str, argument: str
) -> None:
    damaged = tmp_path / "damaged"
    (packages,) = environment.glob("lib/python*/site-packages")
    shutil.copytree(packages / "buildkit", damaged / "buildkit", ignore=shutil.ignore_patterns("project"))
    code = f"import sys; sys.path.insert(0, {str(damaged)!r}); from buildkit.{module} import {function} as main; main()"
    done = run(environment / "bin" / "python", "-c", code, argument, cwd=tmp_path)
    assert done.returncode == 3
    assert str(damaged / "buildkit" / "project" / "images" / "matrix.toml") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wheel_without_its_data_is_not_built(source: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "source"
    shutil.copytree(source, damaged, ignore=shutil.ignore_patterns("images", "build"))
    done = build_wheel(damaged, tmp_path)
    assert done.returncode != 0
    assert "images is missing, and a wheel without it cannot build images" in done.stdout + done.stderr
