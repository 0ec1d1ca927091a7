"""Builds of a small project with the real engine: secrets of the host, and mirrors that fail during a download."""

import json
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.buildkit.small_image import SmallProject, docker, docker_bytes, gateway, random_content
from tests.buildkit.stand_ins import Index
from tests.chaos import mirrors
from tests.chaos.injection import Kind
from tests.publish.conftest import Server
from tests.serving import serving

PLANTED = (
    *("HF_TOKEN", "WANDB_API_KEY", "SLIPWAY_TOKEN", "SLIPWAY_REGISTRY_PASSWORD", "COSIGN_PASSWORD", "MY_SECRET"),
    *("UV_DEFAULT_INDEX", "UV_INDEX", "HTTP_PROXY", "HTTPS_PROXY", "SLIPWAY_INDEX_MIRRORS"),  # a password in an address
    "DECOY",  # which lies in a wheel and in a command line, to show that the search finds it
)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[SmallProject]:
    project = SmallProject(tmp_path / "small")
    yield project
    project.remove()


@contextmanager
def watched_processes() -> Iterator[set[bytes]]:
    """The command lines of all processes of this machine while the context is open."""
    seen, done = set[bytes](), threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    seen.add((process / "cmdline").read_bytes())
                except OSError:  # it has ended
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


def test_no_secret_of_the_host_is_in_an_image_a_message_or_a_process_list(project: SmallProject) -> None:
    values = {name: f"planted-{secrets.token_hex(16)}" for name in PLANTED}
    content = random_content(4096) | {"cargo": values["DECOY"].encode()}
    project.write_wheels(content)
    with serving(Index(project.wheels, gateway())) as index, watched_processes() as processes:
        host = f"{index.server_address[0]}:{index.server_port}"
        addresses = {
            "UV_DEFAULT_INDEX": f"http://me:{values['UV_DEFAULT_INDEX']}@{host}/whl",
            "UV_INDEX": f"http://me:{values['UV_INDEX']}@{host}/other",
            "HTTP_PROXY": f"http://me:{values['HTTP_PROXY']}@127.0.0.1:9",
            "HTTPS_PROXY": f"http://me:{values['HTTPS_PROXY']}@127.0.0.1:9",
            "NO_PROXY": str(index.server_address[0]),
            "SLIPWAY_INDEX_MIRRORS": f"https://a.example=http://me:{values['SLIPWAY_INDEX_MIRRORS']}@127.0.0.1:9",
        }
        built = project.buildkit("build", index.address, values | addresses)
        assert built.returncode == 0, built.stderr
        docker("run", "--rm", "--entrypoint", "true", project.tag, values["DECOY"])
        history = docker("history", "--no-trunc", project.tag).stdout
        description = docker("image", "inspect", project.tag).stdout
        image = docker_bytes("save", project.tag)
        project.write_wheels(random_content(4096))
        next(project.wheels.glob("stone-*")).unlink()
        failed = project.buildkit("build", index.address, values | addresses)
        assert failed.returncode == 5, failed.stderr
    files = {str(path): path.read_bytes() for path in files_below(project.root, project.cache)}
    assert len(files) > 100
    texts = {
        "the image": image,
        "its description": (description + history).encode(),
        "the output": (built.stdout + built.stderr).encode(),
        "the output of a failure": (failed.stdout + failed.stderr).encode(),
        "the process list": b"\n".join(processes),
        **files,
    }
    places = [
        f"{name} in {place}" for place, text in texts.items() for name in PLANTED if values[name].encode() in text
    ]
    assert places == ["DECOY in the image", "DECOY in the process list"]
    assert json.loads(description)[0]["Config"]["Labels"]


def files_below(*roots: Path) -> Iterator[Path]:
    """Files without those behind links, which are the checkout's and the shared cache of bases."""
    for root in roots:
        for folder, _, names in os.walk(root):
            yield from (path for name in names if not (path := Path(folder, name)).is_symlink())


def test_a_mirror_that_moved_on_costs_no_build_and_everything_says_so(project: SmallProject) -> None:
    """The engine, mmdebstrap and Debian's mirror are real; the lock asks for a version that is no longer there."""
    gone = project.move_mirror("tini")
    project.write_wheels(random_content(4096))
    with serving(Index(project.wheels, gateway())) as index:
        refused = project.buildkit("build", index.address, options=["--locked"])
        assert refused.returncode == 6, refused.stderr
        assert f"tini {gone} -> 0." in refused.stderr
        assert "buildkit lock --upgrade-base --target cpu" in refused.stderr
        assert project.images() == []

        built = project.buildkit("build", index.address, options=["--json"])
        assert built.returncode == 0, built.stderr
        assert "its packages are resolved again, alone" in built.stderr
        (change,) = (change for change in json.loads(built.stdout)["base_changes"] if change["package"] == "tini")
        assert change["locked"] == gone

        again = project.buildkit("build", index.address, options=["--json"])
        assert json.loads(again.stdout)["image_id"] == json.loads(built.stdout)["image_id"]

        (project.root / "mine").mkdir()
        (project.root / "mine" / "code.py").write_text("VALUE = 1\n")
        additions = ["--copy", str(project.root / "mine"), "--apt", "jq"]
        for options in ([], ["--from", project.tag]):
            extended = project.buildkit("build", index.address, options=["--json", *additions, *options])
            assert extended.returncode == 0, extended.stderr
            assert change in json.loads(extended.stdout)["base_changes"]
            both = json.loads(docker("image", "inspect", f"{project.tag}-extended").stdout)[0]["Config"]["Labels"]
            assert f"tini {gone} -> {change['installed']}" in both["dev.slipway.base.changes"]
            assert both["dev.slipway.extension"].startswith("sha256:")
        refused = project.buildkit("build", index.address, options=["--locked", *additions, "--from", project.tag])
        assert refused.returncode == 6, refused.stderr
    labels = json.loads(docker("image", "inspect", project.tag).stdout)[0]["Config"]["Labels"]
    assert f"tini {gone} -> {change['installed']}" in labels["dev.slipway.base.changes"]
    described = docker("run", "--rm", "--entrypoint", "cat", project.tag, "/etc/slipway/image.json").stdout
    assert change in json.loads(described)["base"]["changes"]
    installed = docker(
        "run", "--rm", "--entrypoint", "dpkg-query", project.tag, "-W", "-f", "${Version}", "tini"
    ).stdout
    assert installed == change["installed"]
    assert not any(tag.startswith(f"{project.tag}-") for tag in json.loads(built.stdout)["tags"])

    listed = json.loads(project.buildkit("targets", "", options=["--json"]).stdout)
    assert [entry["base_changes"] != [] for entry in listed if entry["variant"] == project.variant] == [True]


@pytest.mark.parametrize("kind", mirrors.KINDS, ids=lambda kind: kind.name)
def test_a_mirror_that_fails_costs_a_build_and_no_image(kind: Kind) -> None:
    assert kind.inject(0).problems == []


def test_push_sends_the_given_tags_and_no_other(project: SmallProject, server: Server) -> None:
    project.write_wheels(random_content(64))
    with serving(Index(project.wheels, gateway())) as index:
        unnamed = project.buildkit("build", index.address, options=("--push", "--tag", "team/small:1"))
        assert (unnamed.returncode, project.image_id()) == (2, None), unnamed.stderr
        assert "--push: --tag team/small:1 names no registry" in unnamed.stderr
        tag = f"{server.host}/team/small:1"
        built = project.buildkit("build", index.address, options=("--push", "--tag", tag))
        assert built.returncode == 0, built.stderr
        assert tag in built.stdout.split()
        assert (server.tags("team/small"), server.tags("slipway")) == ({"1"}, set())
        server.kill()
        refused = project.buildkit("build", index.address, options=("--push", "--tag", tag))
    docker("rmi", tag)
    assert refused.returncode == 20, refused.stderr
    assert f"could not push {tag}" in refused.stderr
