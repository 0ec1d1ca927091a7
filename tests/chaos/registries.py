"""A registry that dies or falls silent while an image is pushed: a real one (docker-registry) on loopback.

The fault comes once the registry has received a random part of the image. Nothing may be tagged then, and pushing again
has to complete the image. Needs the host's tools: run it with `.venv/bin/python`.
"""

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import trustme

from buildkit.errors import RegistryError
from buildkit.registry import transport
from buildkit.registry.client import Registry
from buildkit.registry.content import IMAGE, Descriptor
from tests.chaos.injection import Injection, Kind
from tests.publish.conftest import ROOT, Server, connect, make_server

LAYERS, LAYER_BYTES = 4, 2**22
PATIENCE = 0.5  # of the push that fails
DEADLINE = 60.0
TAG = "latest"

Fault = Callable[[Server], None]


def inject(fault: Fault, random: Random, injection: Injection) -> None:
    os.environ["PATH"] = f"{ROOT / 'build/tools/bin'}:{os.environ['PATH']}"
    transport.TIMEOUT = (PATIENCE, PATIENCE)
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        server = make_server(Path(directory), trustme.CA(key_type=trustme.KeyType.ECDSA))
        server.start()
        try:
            strike(fault, random, injection, server)
        finally:
            server.kill()
        injection.processes = int(server.process is not None and server.process.poll() is None)
    injection.expect_clean()


def strike(fault: Fault, random: Random, injection: Injection, server: Server) -> None:
    layers = [random.randbytes(LAYER_BYTES) for _ in range(LAYERS)]
    received, struck = random.uniform(0, 0.9), list[float]()
    injection.moment = f"{received:.0%} received"

    def watch() -> None:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline and server.stored_bytes() <= received * LAYERS * LAYER_BYTES:
            time.sleep(0.001)
        fault(server)
        struck.append(time.monotonic())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        push(connect(server, "chaos/image", patience=PATIENCE), layers)
        injection.problems.append("the push succeeded")
    except RegistryError as error:
        injection.cause = str(error) if error.hint else ""
        injection.exits = [error.exit_code]
    watcher.join()
    injection.detected = round(time.monotonic() - struck[0], 3)
    injection.expect(server.tags("chaos/image") == set(), "an incomplete image has a tag")
    server.kill()
    server.start()
    again = connect(server, "chaos/image", patience=DEADLINE)
    transport.TIMEOUT = (DEADLINE, DEADLINE)
    blobs = push(again, layers)
    injection.readable = [again.blob(blob) for blob in blobs] == layers
    injection.expect(server.tags("chaos/image") == {TAG}, "the second push has no tag")


def push(registry: Registry, layers: list[bytes]) -> list[Descriptor]:
    """Pushes an image; its layers. Raises RegistryError."""
    blobs = [registry.put_blob(layer, "application/vnd.oci.image.layer.v1.tar") for layer in layers]
    config = registry.put_blob(b"{}", "application/vnd.oci.image.config.v1+json")
    manifest = {
        "schemaVersion": 2,
        "mediaType": IMAGE,
        "config": config.as_json(),
        "layers": [blob.as_json() for blob in blobs],
    }
    registry.put_manifest(TAG, json.dumps(manifest).encode(), IMAGE)
    return blobs


def killed(server: Server) -> None:
    server.kill()


def silent(server: Server) -> None:
    server.signal(signal.SIGSTOP)


KINDS = (
    Kind("registry killed during a push", partial(inject, killed)),
    Kind("registry silent during a push", partial(inject, silent)),
)
