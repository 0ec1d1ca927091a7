"""The standard streams of a command, which never block its work."""

import io
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_WAITING = 2**22  # characters that wait for a slow reader; later ones are lost
DRAIN_SECONDS = 2.0  # for what waits when the command ends


class DetachedStream(io.TextIOBase):
    """A stream to a file, pipe or terminal that may be slow, full or gone: a thread writes, the caller continues."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._size = 0  # of what waits and of what is being written
        self._lost = 0
        self._thread: threading.Thread | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # some callers try bytes, to learn what a stream takes
            raise TypeError(f"{type(text).__name__} is no text")
        with self._changed:
            if self._thread is None or not self._thread.is_alive():  # or this process is a fork
                self._thread = threading.Thread(target=self._write_all, name="console", daemon=True)
                self._thread.start()
            if self._size + len(text) > MOST_WAITING:
                self._lost += text.count("\n")
            else:
                self._waiting.append(text)
                self._size += len(text)
                self._changed.notify_all()
        return len(text)

    def drain(self, seconds: float) -> None:
        """Waits until everything is written or lost, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, seconds)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                text, lost = "".join(self._waiting), self._lost
                self._waiting.clear()
                self._lost = 0
            if lost:
                text = f"{lost} lines are missing here: the console was not read in time\n{text}"
            self._write(text.encode("utf-8", "backslashreplace"))
            with self._changed:
                self._size = sum(map(len, self._waiting))
                self._changed.notify_all()

    def _write(self, content: bytes) -> None:
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:  # full, closed or hung up: another line may find it better
            pass


@contextmanager
def detached_console() -> Iterator[None]:
    """Standard error as a DetachedStream, where it is a stream of this process. Descriptors that are closed, which
    files of the run would get otherwise, lead nowhere."""
    _open_closed()
    before = sys.stderr
    try:
        descriptor = before.fileno()
    except (AttributeError, OSError, ValueError):  # another stream was put there
        yield
        return
    stream = DetachedStream(descriptor)
    sys.stderr = stream
    try:
        yield
    finally:
        stream.drain(DRAIN_SECONDS)
        sys.stderr = before


def _open_closed() -> None:
    """Opens /dev/null in the place of each standard stream that is closed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = Path(os.devnull).open("r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, nowhere)


def discard_output() -> None:
    """Discards standard output, so that a failed write is not repeated."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
