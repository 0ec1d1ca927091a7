"""A warm cache as one archive, `.tar.zst`: the same folder gives the same bytes.

The first member is the manifest, then come the files, sorted, with fixed times, owners and modes. Only the folders in
`PACKED` are packed: a cache directory also holds downloaded models and datasets, the hub's token and what vLLM found
out about the machine.
"""

import io
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

import zstandard

from buildkit.errors import WarmCacheError
from buildkit.registry.compression import COMPRESSIONS, LayerSink, tar_of
from buildkit.warming.cache import MANIFEST, WarmCache, as_json, read_json

PACKED = ("inductor", "triton", "vllm/modelinfos", "vllm/torch_compile_cache")
"""Folders below the cache directory: Inductor's, Triton's and vLLM's compiled code, and vLLM's facts about models."""
LEFT_OUT = re.compile(r"cache_key_factors\.json|locks|.*\.lock|\..*|tmp\..*|.*\.tmp\b.*")
"""Names of files and folders: vLLM's record of the environment, which nothing reads; locks; what is half written."""
FOLDERS = {Path(folder).parts[0] for folder in PACKED}


def packed_files(folder: Path) -> Iterator[str]:
    """The names of the files to pack. Links are left out: compilers write none, and a link could lead anywhere."""
    for place in PACKED:
        for path in (folder / place).rglob("*"):
            inside = path.relative_to(folder)
            if path.is_file() and not path.is_symlink() and not any(map(LEFT_OUT.fullmatch, inside.parts)):
                yield inside.as_posix()


LIMIT = 2**34  # bytes, unpacked; more is refused
MANIFEST_LIMIT = 2**16  # bytes
DAMAGED = (EOFError, UnicodeError, zlib.error, zstandard.ZstdError, tarfile.TarError)
HINT = "get it again, or make it again with `buildkit warm`"


def pack(folder: Path, cache: WarmCache, output: Path, private: Iterable[str] = ()) -> WarmCache:
    """Packs a cache directory into `output`, and returns the manifest with the number and bytes of the files.

    Raises `WarmCacheError` if it holds no compiled code, or if a file contains one of the `private` words.
    """
    files = sorted(packed_files(folder))
    if not files:
        hint = "see the run's output above; on CPU, training compiles nothing"
        raise WarmCacheError(f"the run left nothing to pack in {', '.join(PACKED)}", hint)
    refuse_private(folder, files, [word.encode() for word in private])
    cache = replace(cache, files=len(files), bytes=sum((folder / name).stat().st_size for name in files))
    with new_file(output) as file:
        compression = COMPRESSIONS["zstd"]
        sink = LayerSink(file, compression.compressor())
        manifest = as_json(cache)
        sink.add(member(MANIFEST, len(manifest)), io.BytesIO(manifest))
        for name in files:
            with (folder / name).open("rb") as source:
                sink.add(member(name, os.fstat(source.fileno()).st_size), source)
        sink.finish(compression.media_type)
    return cache


def member(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)  # with time 0, and root as the owner
    entry.size, entry.mode = size, 0o644
    return entry


def refuse_private(folder: Path, files: Iterable[str], private: Iterable[bytes]) -> None:
    """Raises `WarmCacheError` for a file that contains one of the words."""
    for name in files:
        content = (folder / name).read_bytes()
        for word in private:
            if word in content or word in name.encode():
                raise WarmCacheError(
                    f"{name} in the cache contains `{word.decode()}`, which belongs to this machine or run",
                    "a cache is for others, too: run without this variable, or from another folder",
                )


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is complete or absent."""
    with tempfile.TemporaryDirectory(prefix=".warm-", dir=path.parent) as folder:
        unfinished = Path(folder, path.name)
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(path)


def read_cache(archive: Path) -> WarmCache:
    """The manifest. Raises `WarmCacheError` for a file that is no warm cache."""
    with members(archive) as (_tar, cache):
        return cache


def unpack(archive: Path, folder: Path) -> WarmCache:
    """Unpacks into `folder`, which is complete or absent. Raises `WarmCacheError` for a damaged or hostile archive."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as unfinished:
        place = Path(unfinished, "warm")
        with members(archive) as (tar, cache):
            unpack_files(tar, cache, place, archive)
        write(place / MANIFEST, io.BytesIO(as_json(cache)))
        for path in (place, *place.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        if not folder.exists():
            place.rename(folder)
    return cache


@contextmanager
def members(archive: Path) -> Iterator[tuple[tarfile.TarFile, WarmCache]]:
    """The archive after its first member, and the manifest in that."""
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=tar_of(file), mode="r|") as tar:
            first = tar.next()
            manifest = tar.extractfile(first) if first and first.isreg() and first.name == MANIFEST else None
            if manifest is None or first is None or first.size > MANIFEST_LIMIT:
                raise WarmCacheError(f"{archive} is no warm cache: it does not begin with {MANIFEST}", HINT)
            yield tar, read_json(manifest.read())
    except DAMAGED as error:
        raise WarmCacheError(f"{archive} is damaged: {error}", HINT) from error
    except OSError as error:
        raise WarmCacheError(
            f"{archive} cannot be read or unpacked: {error}", "check its path and the space"
        ) from error


def unpack_files(tar: tarfile.TarFile, cache: WarmCache, folder: Path, archive: Path) -> None:
    if cache.bytes > LIMIT:
        raise WarmCacheError(f"{archive} holds {cache.bytes} bytes, more than the limit of {LIMIT}", HINT)
    files = size = 0
    while entry := tar.next():
        refuse_hostile(entry, archive)
        files, size = files + 1, size + entry.size
        if files > cache.files or size > cache.bytes:
            break
        content = tar.extractfile(entry)
        assert content is not None  # it is a regular file
        try:
            write(folder / entry.name, content)
        except (FileExistsError, NotADirectoryError) as error:
            raise WarmCacheError(f"{archive} holds {entry.name} twice", HINT) from error
    if (files, size) != (cache.files, cache.bytes):
        raise WarmCacheError(
            f"{archive} holds {files} files of {size} bytes, and its manifest says {cache.files} of {cache.bytes}",
            HINT,
        )


def refuse_hostile(entry: tarfile.TarInfo, archive: Path) -> None:
    """Raises `WarmCacheError` for anything but a file in one of the caches."""
    parts = PurePosixPath(entry.name).parts
    if not entry.isreg():
        problem = "is a link, a device or a folder: a warm cache holds files"
    elif not parts or parts[0] not in FOLDERS or ".." in parts or len(parts) < 2 or "\0" in entry.name:
        problem = f"lies outside of the caches {', '.join(sorted(FOLDERS))}"
    else:
        return
    raise WarmCacheError(f"{archive}: {entry.name!r} {problem}", "do not use it; find out who made it")


def write(path: Path, content: IO[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        shutil.copyfileobj(content, file)
