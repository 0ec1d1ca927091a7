"""The contents of the image: paths, versions, labels, environment, and no trace of the build host."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from docker.models.images import Image
from testinfra.host import Host

from buildkit.host.settings import read_host
from buildkit.recipe.matrix import load_matrix
from buildkit.supply.base import public_mirror
from tests.smoke.conftest import INSTALLED

PYTHON = "/opt/slipway/venv/bin/python"
ROOT = Path(__file__).parents[2]


def test_tini_is_pid_1_and_launch_its_child(host: Host) -> None:
    assert host.process.get(pid=1).comm == "tini"
    assert host.process.get(ppid=1).args.endswith("/launch --no-ray -- sleep 3600")


def test_entrypoint_and_stop_signal(image: Image) -> None:
    assert image.attrs["Config"]["Entrypoint"] == ["tini", "-g", "--", "launch"]
    assert image.attrs["Config"]["StopSignal"] == "SIGTERM"


@pytest.mark.parametrize("package", ["torch", "ray", "transformers", "vllm", "pyarrow", "tensorboard"])
def test_package_imports_in_the_version_of_the_manifest(host: Host, manifest: dict[str, Any], package: str) -> None:
    names = [package, f"{package}-{manifest['target']}"]
    pinned = next((manifest["pins"][name] for name in names if name in manifest["pins"]), None)
    if pinned is None:
        pytest.skip(f"the variant leaves {package} out: {manifest['excluded'].get(package, 'the base brings it')}")
    done = host.run(f"{PYTHON} -c 'import {package}; print({package}.__version__)'")
    assert done.rc == 0, done.stderr
    # The local part is the distribution's: vLLM's module leaves it out, and torch's adds its CUDA version.
    assert done.stdout.strip().splitlines()[-1].partition("+")[0] == pinned.partition("+")[0]


def test_installed_wheels_are_exactly_the_locked_ones(host: Host, manifest: dict[str, Any]) -> None:
    installed = json.loads(host.check_output(f'{PYTHON} -c "{INSTALLED}"'))
    normalise = re.compile(r"[-_.]+")

    def normalised(pins: dict[str, str]) -> dict[str, str]:
        return {normalise.sub("-", name).lower(): value for name, value in pins.items()}

    assert normalised(installed) == normalised(manifest["pins"])


def test_the_c_library_is_the_one_that_the_wheels_were_resolved_for(host: Host, manifest: dict[str, Any]) -> None:
    assert host.check_output("getconf GNU_LIBC_VERSION") == f"glibc {manifest['base']['glibc']}"


def test_debian_packages_of_the_manifest_are_installed(host: Host, manifest: dict[str, Any]) -> None:
    assert [name for name in manifest["packages"] if not host.package(name).is_installed] == []


@pytest.mark.parametrize("library", ["libibverbs.so.1", "librdmacm.so.1", "libgomp.so.1", "libnuma.so.1"])
def test_library_loads(host: Host, library: str) -> None:
    assert host.run(f"{PYTHON} -c \"import ctypes; ctypes.CDLL('{library}')\"").rc == 0


def test_labels_say_what_the_manifest_says(image: Image, manifest: dict[str, Any]) -> None:
    labels = image.labels
    assert labels["dev.slipway.target"] == manifest["target"]
    assert labels["dev.slipway.variant"] == manifest["variant"]
    assert labels["dev.slipway.lock"] == manifest["lock"]
    assert labels["org.opencontainers.image.version"] == manifest["version"]
    changes = [f"{change['package']} {change['locked'] or 'none'} -> " for change in manifest["base"]["changes"]]
    told = labels.get("dev.slipway.base.changes", "").split("; ")
    assert [line.startswith(change) for line, change in zip(told, changes, strict=False)] == [True] * len(changes)
    for name, pinned in json.loads(labels["dev.slipway.pins"]).items():
        assert pinned in (manifest["pins"].get(name), manifest["pins"].get(f"{name}-{manifest['target']}"))


def test_launch_tells_the_version_of_the_manifest(host: Host, manifest: dict[str, Any]) -> None:
    assert host.check_output("launch --version") == f"launch {manifest['version']}"


def test_baked_environment_contains_only_unconditional_values(image: Image, manifest: dict[str, Any]) -> None:
    baked = dict(entry.split("=", 1) for entry in image.attrs["Config"]["Env"])
    for entry in manifest["env"]:
        if not entry["when"]:
            assert baked[entry["name"]] == entry["value"]
        else:
            assert entry["name"] not in baked
        assert entry["reason"]
        assert entry["source"]
    assert baked["PATH"].startswith("/opt/slipway/venv/bin:")


def test_every_file_is_readable_by_everyone(host: Host) -> None:
    assert host.check_output("find /opt /etc/slipway -not -perm -o=r -not -type l | head") == ""
    assert host.check_output("find /opt -type d -not -perm -o=rx | head") == ""


def test_nothing_needed_lies_under_root(host: Host) -> None:
    assert host.check_output("find /opt /usr -lname '/root*' | head") == ""
    assert host.check_output("find /root -type f -not -name '.bashrc' -not -name '.profile' | head") == ""


COVERED = ("/dev", "/home", "/proc", "/root", "/run", "/sys", "/tmp", "/var/tmp")
"""Folders over which Apptainer mounts the host's (https://apptainer.org/docs/user/main/bind_paths_and_mounts.html)."""


def test_the_image_works_as_a_sif_file(host: Host, image: Image) -> None:
    """Apptainer mounts over directories, runs as the caller, and stores the environment as a shell script."""
    links = " -o ".join(f"-lname '{folder}/*'" for folder in COVERED)
    assert host.check_output(f"find /opt /etc/slipway \\( {links} \\) | head") == ""
    special = "-type b -o -type c -o -type p -o -type s"
    assert host.check_output(f"find /opt /usr /etc /var -xdev \\( {special} \\) | head") == ""
    assert image.attrs["Config"].get("User", "") == ""
    for entry in image.attrs["Config"]["Env"]:
        assert not set(entry) & set("\"'`$\\\n"), f"{entry}: a shell would read it otherwise"


def test_we_add_no_set_uid_programs(host: Host) -> None:
    assert host.check_output("find /opt /etc/slipway -perm /6000 | head") == ""


SEARCHED = ("/etc", "/var", "/opt/slipway/venv/bin", "/opt/slipway/app", "/opt/slipway/venv/pyvenv.cfg")
"""Where a build could leave its host's addresses. `uv` is not searched: it knows the public ones of PyTorch itself."""


def test_no_trace_of_the_build_host(image: Image, host: Host, manifest: dict[str, Any]) -> None:
    """The build uses indexes, certificates and local wheel directories; none of them is in the history or in /etc."""
    settings = read_host()
    variant = load_matrix(ROOT).variant(manifest["target"], manifest["variant"])
    secrets = [*variant.indexes, *map(settings.mirrored, variant.indexes)]
    secrets += [settings.default_index, *settings.indexes, *settings.find_links, *settings.proxies.values()]
    sources = re.findall(r"^URIs:\s*(\S+)", settings.apt_sources, re.MULTILINE)
    public = public_mirror() if manifest["base"]["provider"] == "bootstrap" else None
    secrets += [address for address in sources if public is None or not address.startswith(public)]
    history = json.dumps(image.history()) + json.dumps(image.attrs["Config"])
    for secret in filter(None, secrets):
        assert secret not in history
        done = host.run(f"grep -rlF --exclude uv -- '{secret}' {' '.join(SEARCHED)}")
        assert done.stdout == "", f"{secret} is in the image"
    assert str(Path.home()) + "/" not in history.replace("/root/", "") or Path.home() == Path("/root")
    assert host.run("ls -A /run/slipway").stdout == ""
    if manifest["base"]["provider"] == "bootstrap":  # a public base has its own sources
        assert host.check_output("find /etc/apt/sources.list.d -type f") == "/etc/apt/sources.list.d/debian.sources"
        named = host.file("/etc/apt/sources.list.d/debian.sources").content_string
        assert re.findall(r"^URIs: (.+)/debian(?:-security)?$", named, re.MULTILINE) == [public, public]


def test_installers_keep_to_the_lock(host: Host, manifest: dict[str, Any]) -> None:
    for variable in ("UV_CONSTRAINT", "PIP_CONSTRAINT"):
        lines = host.check_output(f'cat "${variable}"').splitlines()
        assert dict(line.split("==") for line in lines) == manifest["pins"]
    for installer in ("uv pip install", "pip install"):
        done = host.run(f"{installer} --dry-run --no-index 'ray<2'")
        assert done.rc != 0
        assert f"ray=={manifest['pins']['ray']}" in done.stdout + done.stderr


def test_direct_urls_do_not_name_the_host(host: Host) -> None:
    assert host.check_output("find /opt/slipway/venv -name direct_url.json | head") == ""
