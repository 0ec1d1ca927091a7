"""Facts are read from the wheel itself, in a folder of this host."""

import struct
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from buildkit.errors import LockError
from buildkit.host.settings import HostSettings
from buildkit.recipe.lock import Pin
from buildkit.recipe.matrix import Base
from buildkit.supply.wheel_facts import is_named, library_architectures, read_wheel_facts
from tests.serving import serving

BASE = Base("debian12", "debian:bookworm-slim", "3.11", "2.36")
METADATA = """Metadata-Version: 2.1
Name: thing
Requires-Python: >=3.9
Requires-Dist: torch==2
Requires-Dist: x; extra == 'all'
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("thing/__init__.py", "x = 1\n" * 100)
        archive.writestr("thing/models/a.py", "y = 1\n")
        archive.writestr("thing/lib/libnccl.so.2", b"0" * 1000)
        archive.writestr("thing-1.0.data/purelib/thing/tests/big.bin", b"1" * 5000)
        archive.writestr("thing-1.0.dist-info/METADATA", METADATA)
    return path


def host_with(folder: Path) -> HostSettings:
    return HostSettings(None, (), (str(folder),), (), None, {}, "")


def test_sizes_libraries_and_requirements_are_read(wheel: Path) -> None:
    pins = [Pin("thing", "1.0", frozenset())]
    host, roots = host_with(wheel.parent), frozenset({"thing"})
    facts = read_wheel_facts(pins, BASE, host, ["thing/tests"], ["*/models"], roots)["thing"]
    assert facts.bytes == 606 + 1000 + len(METADATA)
    assert facts.python_bytes == 600
    assert facts.libraries == ("libnccl.so.2",)
    assert facts.requires == ("torch==2",)
    assert facts.requires_python == ">=3.9"


def test_a_wheel_for_another_python_is_skipped(wheel: Path) -> None:
    wheel.rename(wheel.with_name("thing-1.0-cp38-cp38-win_amd64.whl"))
    host = HostSettings("http://127.0.0.1:9", (), (str(wheel.parent),), (), None, {}, "")
    with pytest.raises(LockError):
        read_wheel_facts([Pin("thing", "1.0", frozenset())], BASE, host, [], [], frozenset())


@pytest.mark.parametrize("address", ["http://a..b/", "http://127.0.0.1:xx/", "http://127.0.0.1:99999/"])
def test_an_index_that_sends_us_to_no_address_is_named(tmp_path: Path, address: str) -> None:
    """A real server with a page whose link cannot be followed."""
    (tmp_path / "thing").mkdir()
    name = "thing-1.0-py3-none-any.whl"
    (tmp_path / "thing" / "index.html").write_text(f'<html><body><a href="{address}{name}">{name}</a></body></html>')
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        host = HostSettings(f"http://127.0.0.1:{server.server_port}", (), (), (), None, {}, "")
        with pytest.raises(LockError, match="a wheel's contents could not be read"):
            read_wheel_facts([Pin("thing", "1.0", frozenset())], BASE, host, [], [], frozenset())


@pytest.mark.parametrize(
    ("path", "pattern", "gone"),
    [
        ("a/b/c.so", "a/b", True),
        ("a/b/c.so", "a/*/c.so", True),
        ("a/b/c.so", "a/c.so", False),
        ("a/bb/c.so", "a/b", False),
        ("a/b/c.so.1", "a/b/*.so", False),
    ],
)
def test_star_does_not_match_a_slash(path: str, pattern: str, gone: bool) -> None:
    assert is_named(path, [pattern]) == gone


def fatbin(*architectures: int) -> bytes:
    entries = b"".join(
        struct.pack("<HHIQ", 2, 0x101, 64, 128)
        + b"\0" * 12
        + struct.pack("<I", architecture)
        + b"\0" * 32
        + b"\1" * 128
        for architecture in architectures
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_architectures_are_read_from_fat_binaries() -> None:
    content = b"elf" * 100 + fatbin(80, 90) + b"\0" * 64 + fatbin(100) + b"tail"
    assert library_architectures(content) == {"sm_80", "sm_90", "sm_100"}
