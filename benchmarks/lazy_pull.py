"""Pulls of the image with each compression over a slow link, and when the files of a first step are there.

    buildkit build --target cpu && ci/engine .venv/bin/python -m benchmarks.lazy_pull [--rates 10 50]

Registry, engine and image are real; a proxy on loopback limits the link. A first step's files are those that the
imports of torch, vLLM and Ray open or map. They are fetched as a lazy snapshotter does it: the tables of contents, then
these files' chunks with range requests. Nothing is mounted. Writes a section of measured/tables.md; takes minutes, and
8 GB of disk.
"""

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import zstandard

from benchmarks.images import PAGE, wait_for
from benchmarks.results import write_section
from buildkit.images.archive import CONFIG, fix_times
from buildkit.images.build import cache_folder
from buildkit.registry.client import Registry
from buildkit.registry.compression import COMPRESSIONS
from buildkit.registry.content import IMAGE, Descriptor, digest_of
from buildkit.registry.contents import FOOTER
from buildkit.registry.credentials import Credentials
from buildkit.registry.reference import Reference

REGISTRY, LINK = "127.0.0.1:5598", "127.0.0.1:5597"
REPOSITORY = "slipway"
COMPARED = ("gzip", "zstd", "zstd-lazy")
EPOCH = 1795392000
PIECE = 2**16  # bytes that the link forwards at once
NEAR = 2**14  # bytes between two files that one request reads along
CONNECTIONS = 8
OPENED = """
import os, sys
found = set()
sys.addaudithook(lambda event, words: found.add(words[0]) if event == "open" and isinstance(words[0], str) else None)
import torch, vllm, ray
found |= {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
print("\\n".join(sorted({os.path.realpath(name) for name in found if os.path.isfile(name)})))
"""


@dataclass(frozen=True)
class FirstStep:
    """`files` are those that the layers have, `tables` and `chunks` bytes."""

    files: int
    tables: int
    chunks: int
    requests: int
    seconds: float


# ---- the link and the registry ---------------------------------------------------------------------------------------


class Link:
    """Forwards connections to the registry; all of them together receive `rate` bytes a second."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free_at = rate, 0.0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = REGISTRY.partition(":")
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._forward(reader, back, False), self._forward(there, writer, True))

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, limited: bool) -> None:
        try:
            while piece := await source.read(PIECE):
                if limited:
                    now = time.monotonic()
                    self._free_at = max(self._free_at, now) + len(piece) / self._rate
                    await asyncio.sleep(self._free_at - now)
                target.write(piece)
                await target.drain()
        except ConnectionError:
            pass  # one side has closed
        target.close()


@contextmanager
def link(rate: float) -> Iterator[None]:
    """Opens `LINK` at `rate` bytes a second."""
    loop = asyncio.new_event_loop()
    host, _, port = LINK.partition(":")
    server = loop.run_until_complete(asyncio.start_server(Link(rate).accept, host, int(port)))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextmanager
def registry_server(folder: Path) -> Iterator[None]:
    config = {
        "version": "0.1", "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": f"{folder}/storage"}}, "http": {"addr": REGISTRY},
    }  # fmt: skip
    (folder / "config.yml").write_text(json.dumps(config))
    with (folder / "log").open("wb") as log:  # it reports each blob that it does not have yet
        server = subprocess.Popen(["docker-registry", "serve", f"{folder}/config.yml"], stderr=log)
    try:
        wait_for(REGISTRY)
        yield
    finally:
        server.terminate()
        server.wait(timeout=30)


def connect(host: str) -> Registry:
    return Registry(Reference(host, REPOSITORY, secure=False), Credentials())


def push(image: str, folder: Path) -> dict[str, int]:
    """Pushes the image once for each compression; the bytes of its layers."""
    saved = folder / "saved.tar"
    subprocess.run(["docker", "save", "--output", str(saved), image], check=True)
    registry, sizes = connect(REGISTRY), {}
    for name in COMPARED:
        with tempfile.TemporaryDirectory(dir=folder) as layers:
            archive = fix_times(saved, Path(layers), EPOCH, COMPRESSIONS[name])
            for layer in archive.layers:
                registry.put_file(layer.path, layer.blob)
            registry.put_blob(archive.config, CONFIG)
            registry.put_manifest(name, archive.manifest, IMAGE)
            sizes[name] = sum(layer.blob.size for layer in archive.layers)
    saved.unlink()
    return sizes


# ---- what is measured ------------------------------------------------------------------------------------------------


def pull(compression: str) -> float:
    """Seconds until the engine has the whole image."""
    name = f"{LINK}/{REPOSITORY}:{compression}"
    start = time.monotonic()
    subprocess.run(["docker", "pull", "--quiet", name], check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    subprocess.run(["docker", "rmi", name], check=True, stdout=subprocess.DEVNULL)
    return seconds


def opened_files(image: str) -> set[str]:
    """The paths, without a slash before them, that a container reads to import torch, vLLM and Ray."""
    command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", OPENED]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {line.lstrip("/") for line in done.stdout.splitlines() if line.startswith("/")}


def fetch_first_step(files: set[str]) -> FirstStep:
    """Fetches the tables of contents and the files' chunks, and compares each chunk with its digest."""
    start = time.monotonic()
    registry = connect(LINK)
    manifest = registry.manifest("zstd-lazy")
    assert manifest is not None
    wanted, tables, runs, fetched = set(files), 0, [], 0
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        read = list(pool.map(read_table, manifest.layers))
        for layer, (size, entries) in reversed(list(zip(manifest.layers, read, strict=True))):  # upper layers win
            tables += size
            chunks = [entry for entry in entries if entry["name"] in wanted and "chunkDigest" in entry]
            names = {str(entry["name"]) for entry in chunks}
            fetched += len(names)
            wanted -= names
            runs += [(layer, run) for run in joined(chunks)]
        received = sum(pool.map(lambda pair: read_run(*pair), runs))
    requests = 1 + 2 * len(manifest.layers) + len(runs)
    return FirstStep(fetched, tables, received, requests, time.monotonic() - start)


def read_table(layer: Descriptor) -> tuple[int, list[dict[str, object]]]:
    """The bytes and the entries of a layer's table of contents."""
    registry = connect(LINK)
    footer = registry.blob_range(layer, layer.size - FOOTER.size, FOOTER.size)
    offset, size, *_ = FOOTER.unpack(footer)
    table = zstandard.decompress(registry.blob_range(layer, offset, size))
    return len(footer) + size, json.loads(table)["entries"]


Run = list[dict[str, object]]


def joined(chunks: Run) -> list[Run]:
    """Chunks that one request reads."""
    runs: list[Run] = []
    for chunk in sorted(chunks, key=lambda chunk: number(chunk, "offset")):
        if runs and number(chunk, "offset") - number(runs[-1][-1], "endOffset") <= NEAR:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs


def number(chunk: dict[str, object], name: str) -> int:
    value = chunk[name]
    assert isinstance(value, int)
    return value


def read_run(layer: Descriptor, run: Run) -> int:
    first, end = number(run[0], "offset"), number(run[-1], "endOffset")
    content = thread_registry().blob_range(layer, first, end - first)
    for chunk in run:
        packed = content[number(chunk, "offset") - first : number(chunk, "endOffset") - first]
        assert digest_of(zstandard.decompress(packed)) == chunk["chunkDigest"]
    return len(content)


_kept = threading.local()


def thread_registry() -> Registry:
    """This thread's own connection."""
    if not hasattr(_kept, "registry"):
        _kept.registry = connect(LINK)
    registry: Registry = _kept.registry
    return registry


# ---- the section -----------------------------------------------------------------------------------------------------


def section(
    rates: list[int], sizes: dict[str, int], pulls: dict[tuple[str, int], float], steps: list[FirstStep]
) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    first = steps[0]
    heads = " | ".join(f"{rate} MB/s, s" for rate in rates)
    lines = [
        f"`python -m benchmarks.lazy_pull --rates {' '.join(map(str, rates))}`, {datetime.now(UTC):%Y-%m-%d},"
        f" {os.cpu_count()} cores (shared with other work), {memory:.0f} GiB, Debian 12.",
        "The cpu image from a registry on loopback, through a proxy that limits the link: `docker pull` of the whole",
        "image, and the files that `import torch, vllm, ray` reads, by range requests on 8 connections.",
        "",
        f"| | MB | {heads} |",
        f"| --- | --- |{' --- |' * len(rates)}",
    ]
    for name in COMPARED:
        times = " | ".join(f"{pulls[name, rate]:.0f}" for rate in rates)
        lines.append(f"| whole image, {name} | {sizes[name] / 1e6:.0f} | {times} |")
    times = " | ".join(f"{step.seconds:.0f}" for step in steps)
    lines += [
        f"| first step's files, zstd-lazy | {(first.tables + first.chunks) / 1e6:.0f} | {times} |",
        "",
        f"The first step reads {first.files:,} files of the image, with {first.requests:,} requests; the tables of",
        f"contents are {first.tables / 1e6:.1f} MB of it. Whole files are counted; a mount fetches only chunks in use.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="slipway:cpu")
    parser.add_argument("--rates", type=int, nargs="+", default=[10, 50], help="MB/s")
    options = parser.parse_args()
    files = opened_files(options.image)
    with tempfile.TemporaryDirectory(prefix="lazy-", dir=cache_folder()) as folder, registry_server(Path(folder)):
        sizes = push(options.image, Path(folder))
        pulls, steps = {}, []
        for rate in options.rates:
            with link(rate * 1e6):
                steps.append(fetch_first_step(files))
                pulls |= {(name, rate): pull(name) for name in COMPARED}
    write_section("Pulling over a slow link", section(options.rates, sizes, pulls, steps), PAGE)


if __name__ == "__main__":
    main()
