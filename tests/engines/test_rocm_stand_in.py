"""The ROCm image on its whole way, from a variant without a lock to a published, signed and verified image.

The tools, the registry, Ubuntu, Ray and Transformers are real. Stand-ins are the wheels of vLLM's index and the ROCm
libraries in the base: they have the real names, versions and tags, and need the libraries that the real ones need, but
compute nothing.
"""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.buildkit.stand_ins import INDEX, ROCM_LIBRARIES, SYSTEM_LIBRARIES, Index, write_wheels
from tests.engines.conftest import ROOT, need
from tests.publish.conftest import Server
from tests.serving import serving

pytestmark = pytest.mark.timeout(1800)

BASE = "rocm/dev-ubuntu-24.04:7.2.3-complete"
COPIED = ("buildkit", "entrypoints", "images", "tests", "trainer", "pyproject.toml")
SOURCES = """Types: deb
URIs: {mirror}
Suites: noble noble-updates
Components: main universe
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
"""
RCCL = "int ncclGetVersion(int *version) { *version = 22707; return 0; }"
Buildkit = Callable[..., subprocess.CompletedProcess[str]]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "COSIGN_PASSWORD": ""}  # for keys without one, also where there is no terminal
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def ubuntu_mirror() -> str:
    """The mirror of Ubuntu beside this host's Debian, or the public one."""
    sites = run("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages").split()
    beside = [site.replace("/debian", "/ubuntu") for site in dict.fromkeys(sites) if "/debian" in site]
    for mirror in (*beside, "http://archive.ubuntu.com/ubuntu"):
        with suppress(OSError), urllib.request.urlopen(f"{mirror}/dists/noble/InRelease", timeout=20):
            return mirror
    pytest.skip("no mirror of Ubuntu answers")


def ubuntu_keyring(folder: Path) -> Path:
    name = "usr/share/keyrings/ubuntu-archive-keyring.gpg"
    if not Path("/", name).is_file():
        run("apt-get", "-o", "APT::Sandbox::User=", "download", "ubuntu-keyring", cwd=folder)
        run("dpkg-deb", "-x", next(folder.glob("*.deb")), folder)
        return folder / name
    return Path("/", name)


def write_library(path: Path, source: str = "", *needed: Path) -> None:
    """Compiles a shared object that links to others, as ROCm's do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.with_name(f"{path.name}.c")
    text.write_text(source)
    named = f"-Wl,-soname,{path.name},--no-as-needed"
    run("gcc", "-shared", "-fPIC", "-nostdlib", named, "-o", path, text, *needed)
    text.unlink()


@pytest.fixture(scope="module")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `opt/rocm` with libraries of ROCm's names."""
    need("gcc")
    root = tmp_path_factory.mktemp("rocm")
    library = root / "opt" / "rocm" / "lib"
    for name in ROCM_LIBRARIES:
        write_library(library / name, RCCL if name == "librccl.so.1" else "")
    (root / "opt" / "rocm" / ".info").mkdir()
    (root / "opt" / "rocm" / ".info" / "version").write_text("7.2.3-1\n")
    (root / "etc" / "ld.so.conf.d").mkdir(parents=True)
    (root / "etc" / "ld.so.conf.d" / "10-rocm-opencl.conf").write_text("/opt/rocm/lib\n")
    return root


@pytest.fixture
def base(server: Server, rocm: Path, tmp_path: Path) -> str:
    """Ubuntu with those libraries, in the registry alone."""
    mirror, keyring = ubuntu_mirror(), ubuntu_keyring(tmp_path)
    tar, overlay = tmp_path / "base.tar", tmp_path / "overlay"
    shutil.copytree(rocm, overlay)
    for folder in ("usr/share/keyrings", "etc/apt/sources.list.d"):
        (overlay / folder).mkdir(parents=True)
    shutil.copy2(keyring, overlay / "usr" / "share" / "keyrings")
    (overlay / "etc" / "apt" / "sources.list.d" / "ubuntu.sources").write_text(SOURCES.format(mirror=mirror))
    hooks = [
        f"--customize-hook=sync-in {overlay} /",
        '--customize-hook=rm -f "$1"/etc/apt/sources.list "$1"/etc/apt/apt.conf.d/99mmdebstrap',
        '--customize-hook=chroot "$1" ldconfig',
    ]
    options = ["--variant=minbase", f"--keyring={keyring}", "--components=main,universe"]
    options.append('--aptopt=APT::Sandbox::User "root"')  # pytest's folders are its user's alone
    run("mmdebstrap", *options, "--include=apt,ca-certificates", *hooks, "noble", tar, mirror)
    reference = f"{server.host}/{BASE}"
    run("docker", "import", tar, reference)
    run("docker", "push", "--quiet", reference)
    run("docker", "rmi", reference)
    return reference


@pytest.fixture
def index(rocm: Path, tmp_path: Path) -> Iterator[Index]:
    """The wheels at the address of this host that both buildkit and the containers of a build reach."""
    for name in SYSTEM_LIBRARIES:  # to link to; the image has Ubuntu's own
        write_library(tmp_path / "system" / name)
    needed = [rocm / "opt" / "rocm" / "lib" / name for name in ROCM_LIBRARIES]
    write_library(tmp_path / "any.so", "", *needed, *(tmp_path / "system" / name for name in SYSTEM_LIBRARIES))
    write_wheels(tmp_path / "wheels", (tmp_path / "any.so").read_bytes())
    gateway = run("docker", "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    with serving(Index(tmp_path / "wheels", gateway.strip())) as index:
        yield index


@pytest.fixture
def buildkit(base: str, index: Index, tmp_path: Path) -> Iterator[Buildkit]:
    """`buildkit` in a copy of the project whose base is the one in the registry. Removes the images at the end."""
    root = tmp_path / "project"
    root.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, root / name)
    matrix = root / "images" / "matrix.toml"
    matrix.write_text(matrix.read_text().replace(BASE, base).replace("disk_gib = 60", "disk_gib = 6"))
    run("git", "init", "--quiet", cwd=root)
    commit(root)
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(root),
        "SLIPWAY_INDEX_MIRRORS": f"{INDEX}={index.address}",
        "COSIGN_PASSWORD": "",
    }

    def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "buildkit", *arguments]
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)

    yield call
    for name in run("docker", "images", "--quiet", "--filter", "reference=slipway:rocm-rocm7.2-wheels*").split():
        subprocess.run(["docker", "rmi", "--force", name], check=False, capture_output=True)


def commit(root: Path) -> None:
    run("git", "add", ".", cwd=root)
    run("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x", cwd=root)


def succeed(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def test_rocm_from_lock_to_verified_image_with_stand_in_wheels_and_base(
    buildkit: Buildkit, server: Server, index: Index, tmp_path: Path
) -> None:
    target = ("--target", "rocm")
    refused = buildkit("build", *target, "--locked")
    assert refused.returncode == 6
    assert "buildkit lock --target rocm --variant rocm7.2-wheels" in refused.stderr

    built = succeed(buildkit("build", *target, "--json", "--progress", "plain"))
    assert "has no lock yet; resolving it first" in built.stderr
    assert json.loads(built.stdout)["base_provider"] == "registry"
    lock = (tmp_path / "project" / "images" / "locks" / "rocm" / "rocm7.2-wheels.txt").read_text()
    assert "torch==2.13.0+git733fca1" in lock
    assert "://" not in lock
    plan = json.loads(succeed(buildkit("plan", *target, "--json")).stdout)
    assert {check["status"] for check in plan["checks"]} == {"ok"}
    assert plan["changed"] == []

    image = json.loads(built.stdout)["tags"][0]
    code = "import vllm, torch, ctypes; print(torch.__version__, vllm.__version__)"
    words = ["docker", "run", "--rm", "--entrypoint", "/opt/slipway/venv/bin/python", image, "-c", code]
    assert run(*words) == "2.13.0+git733fca1 0.31.0\n"
    succeed(buildkit("test", *target, "--tier", "smoke", "--", "-q"))

    run("cosign", "generate-key-pair", cwd=tmp_path)
    repository = f"http://{server.host}/team/slipway"
    publish = ("publish", *target, "--registry", repository, "--key", tmp_path / "cosign.key")
    refused = buildkit(*publish)
    assert refused.returncode == 22
    assert "rocm7.2-wheels.txt is not committed" in refused.stderr
    commit(tmp_path / "project")
    published = succeed(buildkit(*publish, "--", "-q", "-k", "labels or manifest or trace")).stdout.split()
    assert published[-1].endswith("/team/slipway:rocm")
    verified = succeed(buildkit("verify", "--published", f"{repository}:rocm", "--key", tmp_path / "cosign.pub"))
    assert "exactly those installed" in verified.stderr
