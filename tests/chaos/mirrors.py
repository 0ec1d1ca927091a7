"""A package mirror that dies or falls silent during a download of `buildkit build`, on a small project.

The mirror is an index of this process; engine, base and uv are real. An older image is there before the build. It stays
as it is, and the next build, with the same address, succeeds. Needs the host's tools and a Docker engine.
"""

import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from tests.buildkit.small_image import WHEELS, SmallProject, docker_bytes, gateway, random_content
from tests.buildkit.stand_ins import Index, IndexHandler
from tests.chaos.injection import Injection, Kind, NotStartedError, first_line

WHEEL_BYTES, CHUNK = 2**21, 2**14
PATIENCE = {"UV_HTTP_TIMEOUT": "3", "UV_HTTP_RETRIES": "1"}  # seconds of silence, and attempts after the first
BUILD_FAILED = 5
BUILD = "build"


class Mirror(Index):
    """An index that fails after it has sent some bytes of wheels: `fail` gets the mirror."""

    def __init__(self, folder: Path, port: int = 0, after: float = float("inf"), fail: "Fault | None" = None) -> None:
        super().__init__(folder, gateway(), port, MirrorHandler)
        self.left, self.fail = after, fail
        self.struck = 0.0
        self.recovered = threading.Event()
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=partial(self.serve_forever, 0.01))
        self._thread.start()

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def count(self, size: int) -> None:
        """Takes note of bytes that are to be sent; blocks or raises OSError once the mirror has failed."""
        with self._lock:
            self.left -= size
            first = self.left <= 0 and not self.struck
            self.struck = time.monotonic() if first else self.struck
        if self.fail and (first or self.struck):
            self.fail(self)

    def die(self) -> None:
        """Ends every connection, and accepts no other one."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class MirrorHandler(IndexHandler):
    server: Mirror

    def parse_request(self) -> bool:
        self.server.count(0)
        return super().parse_request()

    def send(self, content: bytes) -> None:
        for start in range(0, len(content), CHUNK):
            self.server.count(CHUNK if self.path.startswith("/files/") else 0)
            super().send(content[start : start + CHUNK])

    def handle(self) -> None:
        with suppress(OSError):  # the connection is gone
            super().handle()


Fault = Callable[[Mirror], None]


def dead(mirror: Mirror) -> None:
    mirror.die()
    raise ConnectionAbortedError


def silent(mirror: Mirror) -> None:
    mirror.recovered.wait()
    raise ConnectionAbortedError


def inject(fault: Fault, random: Random, injection: Injection) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        project, before = SmallProject(Path(directory) / "small"), secrets_left()
        try:
            strike(fault, random, injection, project)
        finally:
            project.remove()
        injection.files = len(secrets_left() - before)
    injection.expect_clean()


def secrets_left() -> set[Path]:
    """The folders in which builds keep the settings of this host."""
    return set(Path(tempfile.gettempdir()).glob("slipway-secrets-*"))


def strike(fault: Fault, random: Random, injection: Injection, project: SmallProject) -> None:
    project.write_wheels(random_content(WHEEL_BYTES))
    mirror = Mirror(project.wheels)
    try:
        older = project.buildkit(BUILD, mirror.address)
    finally:
        mirror.die()
    if older.returncode:
        raise NotStartedError(f"no image: {older.stderr[-2000:]}")
    images, image = project.images(), project.image_id()
    content = random_content(WHEEL_BYTES)
    project.write_wheels(content)
    part = random.uniform(0, 0.95)
    injection.moment = f"{part:.0%} sent"
    failing = Mirror(project.wheels, mirror.server_port, part * WHEEL_BYTES * len(WHEELS), fault)
    try:
        failed = project.buildkit(BUILD, failing.address, PATIENCE)
        ended = time.monotonic()
    finally:
        failing.recovered.set()
        failing.die()
    if not failing.struck:
        raise NotStartedError(f"the mirror did not send {part:.0%}: {failed.stderr[-2000:]}")
    injection.detected = injection.ended = round(ended - failing.struck, 2)
    injection.exits = [failed.returncode]
    injection.expect(injection.exits == [BUILD_FAILED], f"exit code {failed.returncode}: {failed.stderr[-2000:]}")
    named = "|".join(wheel.name for wheel in WHEELS)
    injection.cause = first_line(rf"(Failed to (download|fetch)|Request failed).*\b({named})\b", failed.stderr)
    injection.expect(
        "run the same `buildkit` command again" in failed.stderr, f"no next command: {failed.stderr[-2000:]}"
    )
    injection.expect("Traceback" not in failed.stderr, f"a traceback: {failed.stderr}")
    unchanged = project.image_id() == image and project.images() == images
    injection.expect(unchanged, "the failed build left an image, or changed the older one")
    again = Mirror(project.wheels, mirror.server_port)
    try:
        built = project.buildkit(BUILD, again.address)
    finally:
        again.die()
    injection.expect(built.returncode == 0, f"the next build failed: {built.stderr[-2000:]}")
    injection.readable = installed(project) == content


def installed(project: SmallProject) -> dict[str, bytes]:
    """The content of each wheel in the image."""
    folder = "/opt/slipway/venv/lib/python3.11/site-packages"
    return {
        wheel.name: docker_bytes("run", "--rm", "--entrypoint", "cat", project.tag, f"{folder}/{wheel.libraries[0]}")
        for wheel in WHEELS
    }


KINDS = (
    Kind("mirror dies during a build", partial(inject, dead)),
    Kind("mirror silent during a build", partial(inject, silent)),
)
