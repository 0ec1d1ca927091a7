"""The archive of a warm cache: the same bytes twice, compiled code alone, and nothing that leaves its folder."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from buildkit.errors import WarmCacheError
from buildkit.warming.archive import pack, read_cache, unpack
from buildkit.warming.cache import MANIFEST, WarmCache, as_json
from tests.buildkit.warming.conftest import COMPILED, EMPTY, H200, write_files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_files_give_the_same_bytes(left: Path, archive: Path, tmp_path: Path) -> None:
    again = write_files(tmp_path / "again", dict(reversed(contents(left).items())))
    for path in again.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    pack(again, EMPTY, tmp_path / "again.tar.zst")
    assert (tmp_path / "again.tar.zst").read_bytes() == archive.read_bytes()


def test_only_compiled_code_is_packed(archive: Path, tmp_path: Path) -> None:
    cache = unpack(archive, tmp_path / "unpacked")
    files = contents(tmp_path / "unpacked")
    assert files.pop(MANIFEST) == as_json(cache)
    assert files == COMPILED
    assert (cache.files, cache.bytes) == (len(COMPILED), sum(map(len, COMPILED.values())))
    assert cache.key == H200
    assert read_cache(archive) == cache


def test_unpacked_files_are_readable_by_every_user(archive: Path, tmp_path: Path) -> None:
    unpack(archive, tmp_path / "unpacked")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "unpacked").rglob("*")}
    assert modes == {0o755, 0o644}


def test_a_link_in_the_cache_is_left_out(left: Path, tmp_path: Path) -> None:
    (left / "inductor" / "hosts").symlink_to("/etc/hosts")
    assert pack(left, EMPTY, tmp_path / "cache.tar.zst").files == len(COMPILED)


@pytest.mark.parametrize("word", ["/home/anna/model", "hf_verysecret"])
def test_a_file_with_a_private_word_is_named_and_nothing_is_written(left: Path, tmp_path: Path, word: str) -> None:
    (left / "triton" / "KEY" / "kernel.cubin").write_bytes(b"\x00" + word.encode() + b"\xff")
    with pytest.raises(WarmCacheError, match=rf"triton/KEY/kernel\.cubin in the cache contains `{word}`"):
        pack(left, EMPTY, tmp_path / "cache.tar.zst", ["elsewhere", word])
    assert not (tmp_path / "cache.tar.zst").exists()


def test_a_run_that_compiled_nothing_makes_no_cache(tmp_path: Path) -> None:
    with pytest.raises(WarmCacheError, match="nothing to pack"):
        pack(write_files(tmp_path / "left", {"huggingface/token": b"x"}), EMPTY, tmp_path / "cache.tar.zst")


def member(name: str, content: bytes = b"code", kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size = kind, target, len(content) if kind == tarfile.REGTYPE else 0
    return entry


def write_archive(path: Path, *members: tarfile.TarInfo, files: int = 1, size: int = 4) -> Path:
    """An archive with a manifest of `files` and `size`, and these members."""
    manifest = as_json(WarmCache(H200, "cuda", "small", files, size))
    with (
        path.open("wb") as file,
        zstandard.ZstdCompressor().stream_writer(file) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        tar.addfile(member(MANIFEST, manifest), io.BytesIO(manifest))
        for entry in members:
            tar.addfile(entry, io.BytesIO(b"code" * entry.size))
    return path


@pytest.mark.parametrize(
    ("hostile", "problem"),
    [
        (member("../x"), "lies outside"),
        (member("inductor/../../x"), "lies outside"),
        (member("/etc/cron.d/x"), "lies outside"),
        (member("huggingface/token"), "lies outside"),
        (member("inductor"), "lies outside"),
        (member("inductor/x", kind=tarfile.SYMTYPE, target="/etc/passwd"), "is a link"),
        (member("inductor/x", kind=tarfile.LNKTYPE, target="../../etc/passwd"), "is a link"),
        (member("inductor/x", kind=tarfile.CHRTYPE), "is a link, a device"),
        (member("inductor/x", kind=tarfile.BLKTYPE), "is a link, a device"),
        (member("inductor/x", kind=tarfile.FIFOTYPE), "is a link, a device"),
        (member("inductor/x", kind=tarfile.DIRTYPE), "is a link, a device or a folder"),
    ],
)
def test_a_hostile_member_is_refused(tmp_path: Path, hostile: tarfile.TarInfo, problem: str) -> None:
    archive = write_archive(tmp_path / "bad.tar.zst", member("inductor/good"), hostile, files=2, size=8)
    with pytest.raises(WarmCacheError, match=problem):
        unpack(archive, tmp_path / "place" / "unpacked")
    assert list(tmp_path.rglob("*")) == [tmp_path / "bad.tar.zst", tmp_path / "place"]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: write_archive(path, member("inductor/x"), member("inductor/y")), "its manifest says 1 of 4"),
        (lambda path: write_archive(path, member("inductor/x"), files=2), "its manifest says 2 of 4"),
        (lambda path: write_archive(path, member("triton/x"), member("triton/x"), files=2, size=8), "x twice"),
        (lambda path: write_archive(path, member("triton/x"), member("triton/x/y"), files=2, size=8), "x/y twice"),
        (lambda path: write_archive(path, member("triton/x"), size=2**40), "more than the limit"),
        (lambda path: path.write_bytes(b"no archive"), "damaged"),
        (lambda path: path.write_bytes(b""), "is no warm cache|damaged"),
        (lambda _path: None, "cannot be read"),
    ],
)
def test_a_wrong_archive_is_refused(tmp_path: Path, make: Callable[[Path], object], problem: str) -> None:
    archive = tmp_path / "bad.tar.zst"
    make(archive)
    with pytest.raises(WarmCacheError, match=problem):
        unpack(archive, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_every_cut_of_an_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(WarmCacheError):
            unpack(tmp_path / "cut", tmp_path / "unpacked")


def test_an_archive_of_another_kind_is_no_warm_cache(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.addfile(member("image.json"), io.BytesIO(b"code"))
    with pytest.raises(WarmCacheError, match=r"does not begin with warm\.json"):
        read_cache(tmp_path / "other.tar")
