"""Exports of a small root file system through a fake docker and real archive tools."""

import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from buildkit.errors import ExportError
from buildkit.images.export import copy_tree, enroot_files, export_image
from buildkit.running.engine import Docker

CONFIG = {"Entrypoint": ["tini", "-g", "--", "launch"], "Env": ["A=b c"], "WorkingDir": "/workspace", "Cmd": None}
IMAGE = {"Id": "sha256:ab", "Size": 4096, "Config": CONFIG}


def tree() -> bytes:
    """A root file system as `docker export` streams it: a folder, a file, a link and an /etc/environment to replace."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folder = tarfile.TarInfo("etc")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        for name, content in (("etc/environment", b"OLD=1\n"), ("bin/launch", b"#!/bin/sh\n")):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("bin/alias")
        link.type, link.linkname = tarfile.SYMTYPE, "launch"
        tar.addfile(link)
    return buffer.getvalue()


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    (tmp_path / "tree.tar").write_bytes(tree())
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "docker").write_text(
        "#!/bin/sh\n"
        'case "$1 $2 $4" in\n'
        '  "info --format"*) echo /;;\n'
        f"  'image inspect '*) [ \"$3\" = image ] && echo '{json.dumps([IMAGE])}';;\n"
        '  "create image"*) echo container;;\n'
        f'  "export "*) cat "{tmp_path}/tree.tar";;\n'
        f'  "save "*) cp "{tmp_path}/tree.tar" "$3";;\n'
        f'  "rm "*) echo "$@" >"{tmp_path}/removed";;\n'
        "  *) exit 1;;\n"
        "esac\n"
    )
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return Docker()


def test_a_missing_image_is_named_with_a_fake_docker(docker: Docker, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no image other"):
        export_image(docker, "other", "docker", tmp_path / "x.tar")


def test_an_archive_gets_its_name_only_when_complete_with_a_fake_docker(docker: Docker, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    assert export_image(docker, "image", "docker", path) == path.stat().st_size
    assert list(tmp_path.glob("*.partial")) == []


def test_a_failed_export_leaves_nothing_and_names_the_tool(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ExportError) as caught:
        export_image(docker, "image", "sif", tmp_path / "x.sif")
    assert "apptainer" in str(caught.value)
    assert caught.value.hint
    assert list(tmp_path.glob("x.sif*")) == []


def test_our_members_are_added_to_the_stream() -> None:
    sink = io.BytesIO()
    copy_tree(io.BytesIO(tree()), sink, {"etc/environment": "A=b\n", "etc/rc": "exec launch\n"})
    sink.seek(0)
    with tarfile.open(fileobj=sink) as tar:
        assert tar.getnames() == ["etc", "bin/launch", "bin/alias", "etc/environment", "etc/rc"]
        environment = tar.extractfile("etc/environment")
        assert environment is not None
        assert environment.read() == b"A=b\n"
        assert tar.getmember("bin/alias").linkname == "launch"


def test_enroot_files_start_the_entrypoint_in_its_directory(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "Entrypoint": ["sh", "-c", 'pwd; echo "$A" "$@"', "x"],
        "WorkingDir": str(tmp_path / "a folder"),
    }
    files = enroot_files(config)
    assert files["etc/environment"] == "A=b c\n"
    done = subprocess.run(
        ["sh", "-c", files["etc/rc"], "rc", "one", "two"], capture_output=True, text=True, env={"A": "b"}, check=True
    )
    assert done.stdout == f"{tmp_path}/a folder\nb one two\n"


@pytest.mark.skipif(shutil.which("sqfstar") is None, reason="squashfs-tools 4.5 are not installed")
def test_squashfs_contains_the_tree_and_enroots_files_with_a_fake_docker(docker: Docker, tmp_path: Path) -> None:
    path = tmp_path / "image.sqsh"
    export_image(docker, "image", "squashfs", path)
    listing = subprocess.run(["unsquashfs", "-ll", path], capture_output=True, text=True, check=True).stdout
    assert "bin/alias -> launch" in listing
    content = subprocess.run(["unsquashfs", "-cat", path, "etc/rc", "etc/environment"], capture_output=True, text=True)
    assert 'exec tini -g -- launch "$@"' in content.stdout
    assert "OLD=1" not in content.stdout
    assert "container" in (tmp_path / "removed").read_text(), "the container that was made for it is gone"
