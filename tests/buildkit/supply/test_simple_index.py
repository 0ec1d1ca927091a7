"""Wheels are found through simple indexes (JSON or HTML, over HTTP or on disk) and read in parts."""

import gc
import hashlib
import http.server
import io
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from buildkit.errors import LockError
from buildkit.host.settings import HostSettings
from buildkit.recipe.matrix import Base
from buildkit.supply.only_wheels import only_wheels
from buildkit.supply.simple_index import OfferedFile, local_offers, offered_wheels, remote_offers
from buildkit.supply.wheel_facts import Pin, read_wheel_facts
from tests.serving import serving

NAME = "some_thing-1.0+cpu-py3-none-any.whl"
QUOTED = NAME.replace("+", "%2B")
JSON = "application/vnd.pypi.simple.v1+json"


def make_wheel() -> bytes:
    """A wheel of 400 kB, of which the facts need a small part."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("some_thing/weights.bin", random.Random(0).randbytes(400_000))
        archive.writestr("some_thing/__init__.py", "x = 1\n" * 100)
        archive.writestr("some_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nRequires-Dist: torch==2\n")
    return buffer.getvalue()


WHEEL = make_wheel()
SHA256 = hashlib.sha256(WHEEL).hexdigest()
BASE = Base("debian12", "debian:bookworm-slim", "3.11", "2.36")
PIN = Pin("some-thing", "1.0+cpu", frozenset({SHA256}))
SOURCE, SOURCE_SHA256 = "some-thing-1.0.tar.gz", "0" * 64
LINKS = f"""<!DOCTYPE html><html><body>
<a href="../../files/{SOURCE}#sha256={SOURCE_SHA256}">{SOURCE}</a><br/>
<a  data-requires-python="&gt;=3.9"
    href='../../files/{QUOTED}#sha256={SHA256}'>{NAME}</a>
</body></html>"""
PAGE = {
    "meta": {"api-version": "1.1"},
    "name": "some-thing",
    "files": [
        {"filename": SOURCE, "url": f"../../files/{SOURCE}", "hashes": {"sha256": SOURCE_SHA256}},
        {"filename": NAME, "url": f"../../files/{QUOTED}", "hashes": {"sha256": SHA256}},
    ],
}


class Index(http.server.ThreadingHTTPServer):
    """Serves the page of `some-thing` and its wheel.

    `accepted` are the Accept headers of its clients; `sent_bytes` counts the bytes of the wheel.
    """

    def __init__(self, kind: str, page: str, ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), IndexHandler)
        self.kind, self.page, self.ranges = kind, page, ranges
        self.accepted: list[str] = []
        self.sent_bytes = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class IndexHandler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/some-thing/":
            self.server.accepted.append(self.headers["Accept"])
            self.answer(200, self.server.page.encode(), self.server.kind)
        elif self.path == f"/files/{QUOTED}":
            self.answer_range()
        else:
            self.answer(403 if self.path.startswith("/forbidden/") else 404)

    def answer_range(self) -> None:
        if not self.server.ranges:
            return self.answer(200, WHEEL)
        start, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        first, last = (int(start), int(end)) if start else (max(0, len(WHEEL) - int(end)), len(WHEEL) - 1)
        part = WHEEL[first : last + 1]
        self.server.sent_bytes += len(part)
        return self.answer(206, part, **{"Content-Range": f"bytes {first}-{last}/{len(WHEEL)}"})

    def answer(self, status: int, body: bytes = b"", kind: str = "application/octet-stream", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(params=[(JSON, json.dumps(PAGE)), ("text/html; charset=utf-8", LINKS)], ids=["json", "html"])
def index(request: pytest.FixtureRequest) -> Iterator[Index]:
    with serving(Index(*request.param)) as index:
        yield index


@pytest.fixture
def index_without_ranges() -> Iterator[Index]:
    with serving(Index(JSON, json.dumps(PAGE), ranges=False)) as index:
        yield index


@pytest.fixture
def other_server() -> Iterator[Index]:
    with serving(Index("application/json", '{"hello": "world"}')) as index:
        yield index


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def host_with(default: str | None = None, indexes: tuple[str, ...] = (), links: tuple[str, ...] = ()) -> HostSettings:
    return HostSettings(default, indexes, links, (), None, {}, "")


def test_index_answers_as_json_or_html(index: Index, session: requests.Session) -> None:
    offers = list(remote_offers(f"{index.address}/simple", "some-thing", session))
    assert [file.filename for file in offers] == [SOURCE, NAME]
    assert offers[1] == OfferedFile(NAME, f"{index.address}/files/{QUOTED}", (("sha256", SHA256),))
    assert JSON in index.accepted[0]


def locked(*hashes: str) -> str:
    return " \\\n    ".join(["some-thing==1.0+cpu", *(f"--hash=sha256:{sha256}" for sha256 in hashes)]) + "\n"


@pytest.mark.parametrize("hashes", [(SOURCE_SHA256, SHA256), (SHA256, SOURCE_SHA256)])
def test_a_lock_keeps_the_hashes_of_wheels_alone(index: Index, hashes: tuple[str, ...]) -> None:
    host = host_with(f"{index.address}/simple")
    assert only_wheels(locked(*hashes), host) == locked(SHA256)
    assert only_wheels(locked(SHA256), host) == locked(SHA256)


def test_a_hash_that_no_index_lists_stays(index: Index) -> None:
    computed = "1" * 64
    host = host_with(f"{index.address}/simple")
    assert only_wheels(locked(SOURCE_SHA256, computed), host) == locked(computed)


def test_a_version_with_a_source_archive_alone_is_not_locked(index: Index) -> None:
    with pytest.raises(LockError, match=r"no index has a wheel of some-thing 1\.0\+cpu"):
        only_wheels(locked(SOURCE_SHA256), host_with(f"{index.address}/simple"))


def test_index_without_the_distribution_offers_nothing(index: Index, session: requests.Session) -> None:
    assert list(remote_offers(f"{index.address}/simple", "absent", session)) == []
    assert list(remote_offers(f"{index.address}/forbidden", "some-thing", session)) == []


def test_server_without_an_index_is_named(other_server: Index, session: requests.Session) -> None:
    with pytest.raises(LockError, match=rf"{other_server.address}/simple/some-thing/ is not a page of a simple index"):
        list(remote_offers(f"{other_server.address}/simple", "some-thing", session))


def test_facts_are_read_from_parts_of_the_wheel(index: Index) -> None:
    host = host_with(f"{index.address}/simple")
    facts = read_wheel_facts([PIN], BASE, host, [], [], frozenset({"some-thing"}))["some-thing"]
    assert facts.bytes == 400_600 + len("Metadata-Version: 2.1\nRequires-Dist: torch==2\n")
    assert facts.requires == ("torch==2",)
    assert 0 < index.sent_bytes < len(WHEEL) / 2


def test_wheel_whose_hash_differs_from_the_lock_is_skipped(index: Index) -> None:
    pin = Pin(PIN.name, PIN.version, frozenset({"0" * 64}))
    with pytest.raises(LockError, match="no index has a wheel of some-thing"):
        read_wheel_facts([pin], BASE, host_with(f"{index.address}/simple"), [], [], frozenset())


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # remotezip leaves the refused answer open
def test_server_without_ranges_is_named(index_without_ranges: Index) -> None:
    with pytest.raises(LockError, match="range requests") as error:
        read_wheel_facts([PIN], BASE, host_with(f"{index_without_ranges.address}/simple"), [], [], frozenset())
    assert "HTTP ranges" in error.value.hint
    del error
    gc.collect()  # here, where the warning is expected


def test_folders_and_local_indexes_come_before_remote_ones(
    index: Index, session: requests.Session, tmp_path: Path
) -> None:
    page = tmp_path / "with space" / "simple" / "some-thing" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(LINKS)
    wheel = tmp_path / "with space" / "files" / NAME
    wheel.parent.mkdir()
    wheel.write_bytes(WHEEL)
    remote = f"{index.address}/simple"
    host = host_with(remote, (remote, (tmp_path / "with space" / "simple").as_uri()), (str(wheel.parent),))
    wheels = list(offered_wheels("some-thing", host, session))
    assert [offer.location for offer in wheels] == [str(wheel), str(wheel), *2 * [f"{index.address}/files/{QUOTED}"]]
    assert [offer.sha256 for offer in wheels] == ["", SHA256, SHA256, SHA256]


def test_local_index_without_the_file_offers_nothing(tmp_path: Path) -> None:
    page = tmp_path / "simple" / "some-thing" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(LINKS.replace("../../files/", "http://127.0.0.1:1/files/") + LINKS)
    assert list(local_offers("some-thing", host_with(indexes=(f"{tmp_path.as_uri()}/simple",)))) == []
