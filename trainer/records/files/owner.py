"""A single writer per run directory, also after a crash and on a shared file system."""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainer.background import ended_within
from trainer.errors import ConfigError, LostRunError, RemovedRunError
from trainer.records.files.regular import open_regular, read_regular
from trainer.records.printable import printable

OWNER = "owner.json"
HEARTBEAT_SECONDS = 5.0
_MOST_BYTES = 2**16  # of the file
RELEASE_SECONDS = 30.0  # on a file system that does not answer
SILENT_SECONDS = 30.0  # without a heartbeat, after which an owner on another node counts as dead

Watch = Callable[[float], object]


class RunOwner:
    """Makes this process the only writer of a run directory while entered.

    `owner.json` names the writer. It is locked as long as the writer lives: the kernel of a node knows that for sure.
    Between nodes a lock may be invisible, so the writer also touches the file every few seconds.
    """

    def __init__(self, run_dir: Path, watch: Watch | None = None) -> None:
        self._run_dir, self._file = run_dir, run_dir / OWNER
        self._stop = threading.Event()
        self._watch = watch or self._stop.wait
        self._me = {"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot(), "id": uuid.uuid4().hex}
        self._thread = threading.Thread(target=self._beat, name="owner", daemon=True)
        self._descriptor = -1
        self._made: list[Path] = []
        self._lost, self._removed = "", False

    def __enter__(self) -> Self:
        """Raises ConfigError if another process writes into the directory, or if nobody can."""
        try:
            self._open()
            self._device = self._run_dir.stat().st_dev
        except OSError as error:
            raise ConfigError(
                f"{self._run_dir}: cannot be written: {error}", hint="set trainer.output_dir to a directory of yours"
            ) from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        ended_within(RELEASE_SECONDS, self._release, f"the release of {self._run_dir}")

    def _release(self) -> None:
        self._thread.join()
        with suppress(OSError):
            if not self._lost:
                self._file.unlink()
        os.close(self._descriptor)
        with suppress(OSError):  # of what this process made, a refused run leaves nothing
            for path in self._made:
                path.rmdir()

    def check(self) -> None:
        """Raises LostRunError if another process took the directory, RemovedRunError if it is gone."""
        if self._lost:
            raise LostRunError(f"{self._run_dir}: {self._lost} writes there now", hint="stop one of the two")
        if self._removed:
            raise RemovedRunError(
                f"{self._run_dir}: removed, moved or emptied while the run wrote there, so its records are incomplete",
                hint="do not move, empty or remove the directory of a run before it has ended",
            )

    def _open(self) -> None:
        """Opens the file, locks it and takes it."""
        self._made = [path for path in (self._run_dir, *self._run_dir.parents) if not path.exists()]
        while True:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_regular(self._file, os.O_RDWR | os.O_CREAT)
            locked = _lock(self._descriptor)
            with suppress(FileNotFoundError):  # its owner has just ended
                if os.path.samestat(os.fstat(self._descriptor), self._file.stat()):
                    break
            os.close(self._descriptor)
        try:
            self._take(locked)
        except ConfigError:
            os.close(self._descriptor)
            raise

    def _take(self, locked: bool | None) -> None:
        other = self._read()
        if locked is not None and (not locked or other.get("boot") == self._me["boot"]):
            alive = not locked  # this kernel knows
        else:
            alive = bool(other) and self._beats()
        if alive:
            raise ConfigError(
                f"{self._run_dir}: {_name(other)} writes into this directory",
                hint="wait until it ends, or set another trainer.run_id",
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, (json.dumps(self._me) + "\n").encode(), 0)
        os.fsync(self._descriptor)

    def _beats(self) -> bool:
        """Whether the file is touched while this process watches it."""
        first = self._touched()
        deadline = time.monotonic() + SILENT_SECONDS
        while time.monotonic() < deadline:
            self._watch(HEARTBEAT_SECONDS)
            if self._touched() != first:
                return True
        return False

    def _touched(self) -> int:
        return self._file.stat().st_mtime_ns

    def _read(self) -> dict[str, Any]:
        """Who owns the directory; empty if nobody does, or the last owner died before it wrote its name."""
        try:
            content = json.loads(read_regular(self._file, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            other = self._read()
            if other and other.get("id") != self._me["id"]:
                self._lost = _name(other)
                return
            with suppress(OSError):  # a disk that is full or away for a while
                if not other and self._is_gone():
                    self._removed = True
                    return
                os.utime(self._descriptor)

    def _is_gone(self) -> bool:
        """Whether this process's file was removed, with the directory or alone. Raises OSError.

        A file system that is away for a while shows no file either, but then a directory above it is another's.
        """
        if self._file.exists():
            return False
        first = next(path for path in (self._run_dir, *self._run_dir.absolute().parents) if path.exists())
        return first.stat().st_dev == self._device


def _lock(descriptor: int) -> bool | None:
    """Whether this process now holds the file's lock; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _boot() -> str:
    """The same in all containers of a machine, until it starts again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _name(owner: dict[str, Any]) -> str:
    return printable(f"process {owner.get('pid')!s:.40} on {owner.get('host')!s:.253}")
