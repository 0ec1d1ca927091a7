"""Makes a warm cache, by a short run of an image on this machine, and opens one to start with."""

import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from buildkit.errors import WarmCacheError
from buildkit.host.machine import read_machine
from buildkit.recipe.matrix import Variant
from buildkit.running.engine import ContainerEngine
from buildkit.running.flags import RunRequest, caller
from buildkit.running.nodes import ending, run_nodes
from buildkit.running.short_run import count_gpus, labels_of, short_run
from buildkit.warming.archive import pack
from buildkit.warming.cache import WarmCache, key_here

log = logging.getLogger(__name__)

FOLDER = "/warm"  # of the run, in the container
CACHE = f"/tmp/slipway-{os.getuid()}"
"""The cache directory in the container: the one that `launch` chooses by default. Some compiled code notes its path."""
LIMIT = 3600  # seconds for the run
STDERR = 2
SHORTEST = 6  # characters of a private word; any code contains shorter ones by chance


@dataclass(frozen=True)
class WarmRun:
    """An image of a variant and a command for `launch`; without a command, PPO of a small model."""

    variant: Variant
    image: str
    command: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


def make_cache(run: WarmRun, engine: ContainerEngine, output: Path) -> WarmCache:
    """Runs it with an empty cache directory, and packs what it left there into `output`.

    Raises `UsageError` for a wrong image, `RunError` without a GPU for its target, `WarmCacheError` if the run fails.
    """
    machine, variant = read_machine(), run.variant
    lock = labels_of(engine, run.image, variant)["dev.slipway.lock"]
    gpus = count_gpus(machine, variant, "warm")
    ranks = min(gpus, 2) if gpus and not run.command else gpus
    with tempfile.TemporaryDirectory(prefix="slipway-warm-") as folder:
        places = {FOLDER: Path(folder, "run"), CACHE: Path(folder, "cache")}
        for place in places.values():
            place.mkdir()
        request = RunRequest(
            image=run.image,
            target=variant.target,
            command=run.command or short_run(FOLDER, max(ranks, 1), bool(gpus), LIMIT),
            volumes=(*(f"{host}:{place}" for place, host in places.items()), *run.volumes),
            environment=(f"SLIPWAY_CACHE_DIR={CACHE}", *run.environment),
            user=caller(),
            gpus=ranks or None,
        )
        log.info("warm: running %s", "the given command" if run.command else "PPO of a small model")
        status = run_nodes(engine, request, machine, STDERR, LIMIT)
        if status != 0:
            raise WarmCacheError(f"the run {ending(status, LIMIT)}", "nothing was packed; see its output above")
        empty = WarmCache(key_here(lock, variant.target, machine), variant.target, variant.name, 0, 0)
        return pack(places[CACHE], empty, output, private_words(request, folder))


def private_words(request: RunRequest, folder: str) -> Iterator[str]:
    """Words that no cache may contain: host name and paths, the job's secret, values of the given variables."""
    values = [variable.partition("=")[2] for variable in request.environment[1:]]
    paths = [folder, *(volume.partition(":")[0] for volume in request.volumes), str(Path.home())]
    common = ("/", "/root", "/home", "localhost")
    words = (socket.gethostname(), request.token, *paths, *values)
    yield from (word for word in words if len(word) >= SHORTEST and word not in common)
